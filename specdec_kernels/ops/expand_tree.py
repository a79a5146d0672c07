"""One level of a drafted tree from the logits of its frontier: the expansion of EAGLE-2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments import conversion as _params
from specdec_kernels.arguments import tree_layout as _checks
from specdec_kernels.arguments.conversion import Param


class Expansion(NamedTuple):
    """What `expand_tree` returns; `F` frontier nodes, `K` children of each.

    tokens: [B, F, K] int64, the most likely first; -1 where there is no child.
    scores: [B, F, K] float32, the log-probability of the whole path; -inf where there is no child.
    frontier: [B, K] int64, the best children of all by score, as indices into the F * K of their
        sequence, best first.
    """

    tokens: Tensor
    scores: Tensor
    frontier: Tensor


def expand_tree(
    logits: Tensor, scores: Tensor, *, width: int, temperature: Param = 1.0
) -> Expansion:
    """The K most likely children of every frontier node, and the K best of them all.

    A child scores `scores[b, f] + log softmax(logits[b, f] / temperature)[token]`. Tokens of equal
    logits come in ascending order, children of equal score in that of their index. A node has no
    children if its score or its row is not finite (a row may hold -inf, but not it alone); fewer
    than K if fewer tokens have a probability. Where no K children are left, the frontier names
    missing ones too: their score is -inf, and so the next level takes them for absent.

    Args:
        logits: [B, F, V] float32, bfloat16 or float16; the last dimension contiguous.
        scores: [B, F] float32, those of the frontier nodes; -inf is an absent node.
        width: K, in [1, 64].
        temperature: scalar or [B]; 0 counts as 1, for it would leave one child a node. A value of a
            tensor that is negative or not finite leaves its sequence without children.

    Raises:
        RuntimeError: a shape, dtype, device or scalar out of range, with its name and value.
        ValueError: an argument of a wrong type.

    Source: EAGLE-2 (arXiv 2406.16858, section 4.1).

    >>> logits = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.7, 0.2]]]).log()
    >>> out = expand_tree(logits, torch.tensor([[0.6, 0.4]]).log(), width=2)
    >>> out.tokens, out.frontier
    (tensor([[[0, 1],
             [1, 2]]]), tensor([[0, 2]]))
    >>> out.scores.exp()
    tensor([[[0.3000, 0.1500],
             [0.2800, 0.0800]]])
    """
    _params.tensors(logits=logits, scores=scores)
    return Expansion(
        *torch.ops.specdec_kernels.expand_tree.default(
            logits, scores, width, *_params.split(temperature, "temperature", 1.0)
        )
    )


@torch.library.register_fake("specdec_kernels::expand_tree")
def _(
    logits: Tensor, scores: Tensor, width: int, temperatures: Tensor | None, temperature: float
) -> tuple[Tensor, ...]:
    _checks.expand_tree(logits, scores, width, temperatures, temperature)
    b, f = logits.shape[:2]
    return (
        logits.new_empty((b, f, width), dtype=torch.int64),
        logits.new_empty((b, f, width), dtype=torch.float32),
        logits.new_empty((b, width), dtype=torch.int64),
    )
