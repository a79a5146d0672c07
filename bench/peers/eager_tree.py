"""Trees in eager PyTorch: a softmax of all rows at once, and one of the rows on the path alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench import eager, eager_tree
from bench.peers.base import Peer, Unsupported
from bench.tree_configs import TreeInputs


def build(inputs: TreeInputs, *, whole: bool) -> Callable[[], Any]:
    point = inputs.point
    turns, rows = itertools.cycle(inputs.turns), torch.arange(point.batch).to(inputs.target.device)
    children = inputs.shape.children.to(inputs.target.device)
    parameters = (inputs.temperature, inputs.top_k, inputs.top_p)
    given = point.start == "probs"
    # The row of the draft at each place with children, from the first of them.
    place = None
    if inputs.draft_rows is not None:
        place = inputs.draft_rows.long()[:, children[:, 0].clamp(min=0)]

    def laws() -> tuple[eager_tree.Law, eager_tree.Law]:
        if given:
            return (lambda at: inputs.target[rows, at]), (lambda at: at)
        draft, shaped = inputs.draft, eager.filtered
        if whole:
            p = shaped(inputs.target, *parameters)
            q = None if draft is None else shaped(draft, inputs.temperature, 0, 1.0)
            return (lambda at: p[rows, at]), (lambda at: q[rows, place[rows, at]])
        return (
            lambda at: shaped(inputs.target[rows, at], *parameters),
            lambda at: shaped(draft[rows, place[rows, at]], inputs.temperature, 0, 1.0),
        )

    def once(rule: Callable[..., Any]) -> Any:
        return rule(next(turns).tokens, children, inputs.shape.depth)

    rules: dict[str, Callable[..., Any]] = {
        "target_only": lambda *rest: eager_tree.target_only(laws()[0], *rest),
        "multi_draft": lambda *rest: eager_tree.multi_draft(*laws(), *rest),
        "multi_draft_wor": lambda *rest: eager_tree.multi_draft(*laws(), *rest, replacement=False),
    }
    if whole:
        rules["greedy"] = partial(eager_tree.greedy, inputs.target)
    if point.rule not in rules or (given and not whole):
        raise Unsupported(f"has no rule {point.rule} of its own from {point.start}")
    return partial(once, rules[point.rule])


PEERS = (
    Peer("eager", lambda device: "", partial(build, whole=True), reads=True),
    Peer("eager-path", lambda device: "", partial(build, whole=False), reads=True),
)
