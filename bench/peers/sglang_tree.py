"""SGLang's kernels for trees, `tree_speculative_sampling_target_only` and `verify_tree_greedy`,
with the softmax, top-k and top-p of its verification where it must start from logits.

Its nodes are numbered with the root as 0. A tree is three arrays [B, N+1] int64: the row of each
node in the flat outputs, its first child and its next sibling, -1 for none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.configs import FILTERS
from bench.peers.base import Peer, Unsupported, importable
from bench.tree_configs import TreeInputs


def links(parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index, first child and next sibling [B, N+1] of trees with these parents [B, N]."""
    b, n = parents.shape
    none, number = n + 1, torch.arange(1, n + 1, device=parents.device)
    index = torch.arange(b * (n + 1), device=parents.device).view(b, n + 1)
    child = torch.full_like(index, none)
    child.scatter_reduce_(1, parents.long() + 1, number.expand(b, n), "amin")
    after = (parents[:, :, None] == parents[:, None]) & (number > number[:, None])
    sibling = torch.where(after, number, none).amin(-1) if n else parents.long()
    sibling = torch.nn.functional.pad(sibling, (1, 0), value=none)
    return index, child.where(child != none, -1), sibling.where(sibling != none, -1)


class _Outputs:
    """What the kernels write: a token for each row, the rows of the path, nodes accepted."""

    def __init__(self, inputs: TreeInputs) -> None:
        b, device = inputs.point.batch, inputs.target.device
        rows = b * (inputs.point.nodes + 1)
        self.predicts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.path = torch.full((b, inputs.shape.depth + 1), -1, dtype=torch.int32, device=device)
        self.accepted = torch.zeros(b, dtype=torch.int32, device=device)

    def __iter__(self) -> Any:
        return iter((self.predicts, self.path, self.accepted))


def _laws(inputs: TreeInputs) -> Tensor:
    """Probabilities [B * (N+1), V] as its verification makes them of logits."""
    temperature, top_k, top_p = FILTERS[inputs.point.filters]
    rows = inputs.target.flatten(0, 1)
    p = torch.softmax(rows / temperature if temperature != 1 else rows, -1, dtype=torch.float32)
    if top_k or top_p < 1:
        import sgl_kernel  # noqa: PLC0415

        if top_k:
            k = torch.full((len(p),), top_k, dtype=torch.int32, device=p.device)
            p = sgl_kernel.top_k_renorm_prob(p, k)
        if top_p < 1:
            p = sgl_kernel.top_p_renorm_prob(p, torch.full((len(p),), top_p, device=p.device))
    return p


def build(inputs: TreeInputs) -> Callable[[], Any]:
    if inputs.point.rule not in ("greedy", "target_only"):
        raise Unsupported(f"has no rule {inputs.point.rule}")
    import sgl_kernel  # noqa: PLC0415

    b, n, device = inputs.point.batch, inputs.point.nodes, inputs.target.device
    outputs, tree = _Outputs(inputs), links(inputs.parents)
    # The root is its column 0: a token that was emitted before.
    turns = itertools.cycle(
        [torch.nn.functional.pad(turn.tokens.long(), (1, 0)) for turn in inputs.turns]
    )
    given = inputs.point.start == "probs"
    kept = torch.zeros_like(inputs.target) if given else None

    def greedy() -> Any:
        best = inputs.target.argmax(-1)
        sgl_kernel.verify_tree_greedy(*outputs, next(turns), *tree, best)
        return outputs.accepted.clone()

    def target_only() -> Any:
        p = inputs.target if given else _laws(inputs).view(b, n + 1, -1)
        # The kernel notes rejected tokens in it: its engine clears one for every call.
        noted = torch.zeros_like(p) if kept is None else kept
        coins, last = torch.rand(b, n + 1, device=device), torch.rand(b, device=device)
        sgl_kernel.tree_speculative_sampling_target_only(
            *outputs, next(turns), *tree, coins, last, p, noted
        )
        return outputs.accepted.clone()

    return greedy if inputs.point.rule == "greedy" else target_only


def _available(device: str) -> str:
    return importable("sgl_kernel") if device == "cuda" else "runs on cuda"


PEERS = (Peer("sglang", _available, build, accepted=lambda accepted: accepted),)
