"""SGLang's tree kernels `tree_speculative_sampling_target_only` and `verify_tree_greedy`.

If they have to start from logits, SGLang's softmax, top-k and top-p are part of the call.

SGLang numbers nodes from the root, which is node 0. A tree is three arrays [B, N+1] int64: each
node's index in the flat outputs, its first child and its next sibling, with -1 for none.
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
    """(index, first child, next sibling), each [B, N+1], of trees with parents [B, N]."""
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
    """Outputs of the kernels: a token for each node, the path, the number of accepted nodes."""

    def __init__(self, inputs: TreeInputs) -> None:
        b, device = inputs.config.batch, inputs.target.device
        rows = b * (inputs.config.nodes + 1)
        self.predicts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.path = torch.full((b, inputs.shape.depth + 1), -1, dtype=torch.int32, device=device)
        self.accepted = torch.zeros(b, dtype=torch.int32, device=device)

    def __iter__(self) -> Any:
        return iter((self.predicts, self.path, self.accepted))


def _target_probs(inputs: TreeInputs) -> Tensor:
    """Target probabilities [B * (N+1), V], computed from logits as SGLang's verification does."""
    temperature, top_k, top_p = FILTERS[inputs.config.filters]
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
    if inputs.config.rule not in ("greedy", "target_only"):
        raise Unsupported(f"has no rule {inputs.config.rule}")
    import sgl_kernel  # noqa: PLC0415

    b, n, device = inputs.config.batch, inputs.config.nodes, inputs.target.device
    outputs, tree = _Outputs(inputs), links(inputs.parents)
    # Column 0 is the root, whose token was emitted before and is not read.
    turns = itertools.cycle(
        [torch.nn.functional.pad(turn.tokens.long(), (1, 0)) for turn in inputs.turns]
    )
    given = inputs.config.start == "probs"
    kept = torch.zeros_like(inputs.target) if given else None

    def greedy() -> Any:
        best = inputs.target.argmax(-1)
        sgl_kernel.verify_tree_greedy(*outputs, next(turns), *tree, best)
        return outputs.accepted.clone()

    def target_only() -> Any:
        p = inputs.target if given else _target_probs(inputs).view(b, n + 1, -1)
        # The kernel writes the probabilities of rejected tokens here; SGLang's engine allocates
        # and clears this tensor for every call.
        rejected = torch.zeros_like(p) if kept is None else kept
        uniforms, last = torch.rand(b, n + 1, device=device), torch.rand(b, device=device)
        sgl_kernel.tree_speculative_sampling_target_only(
            *outputs, next(turns), *tree, uniforms, last, p, rejected
        )
        return outputs.accepted.clone()

    return greedy if inputs.config.rule == "greedy" else target_only


def _available(device: str) -> str:
    return importable("sgl_kernel") if device == "cuda" else "runs on cuda"


PEERS = (Peer("sglang", _available, build, accepted=lambda accepted: accepted),)
