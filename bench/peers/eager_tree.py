"""Tree verification in eager PyTorch, with a softmax of all rows or of the rows on the path."""

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
    config = inputs.config
    turns = itertools.cycle(inputs.turns)
    sequences = torch.arange(config.batch).to(inputs.target.device)
    children = inputs.shape.children.to(inputs.target.device)
    parameters = (inputs.temperature, inputs.top_k, inputs.top_p)
    given = config.start == "probs"
    # The draft row of each node's children, taken from the first child.
    of_children = None
    if inputs.draft_rows is not None:
        of_children = inputs.draft_rows.long()[:, children[:, 0].clamp(min=0)]

    def of_node(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert of_children is not None
        return sequences, of_children[sequences, at]

    def distributions() -> tuple[eager_tree.Distribution, eager_tree.Distribution]:
        if given:
            return (lambda at: inputs.target[sequences, at]), (lambda at: at)
        draft, filtered = inputs.draft, eager.filtered
        if whole:
            p = filtered(inputs.target, *parameters)
            q = None if draft is None else filtered(draft, inputs.temperature, 0, 1.0)
            return (lambda at: p[sequences, at]), (lambda at: q[of_node(at)])
        return (
            lambda at: filtered(inputs.target[sequences, at], *parameters),
            lambda at: filtered(draft[of_node(at)], inputs.temperature, 0, 1.0),
        )

    def once(rule: Callable[..., Any]) -> Any:
        return rule(next(turns).tokens, children, inputs.shape.depth)

    rules: dict[str, Callable[..., Any]] = {
        "target_only": lambda *rest: eager_tree.target_only(distributions()[0], *rest),
        "multi_draft": lambda *rest: eager_tree.multi_draft(*distributions(), *rest),
        "multi_draft_wor": lambda *rest: eager_tree.multi_draft(
            *distributions(), *rest, replacement=False
        ),
    }
    if whole:
        rules["greedy"] = partial(eager_tree.greedy, inputs.target)
    if config.rule not in rules or (given and not whole):
        raise Unsupported(f"has no rule {config.rule} of its own from {config.start}")
    return partial(once, rules[config.rule])


PEERS = (
    Peer("eager", lambda device: "", partial(build, whole=True), reads=True),
    Peer("eager-path", lambda device: "", partial(build, whole=False), reads=True),
)
