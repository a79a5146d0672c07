"""Growing a drafted tree by one level: the expansion step of EAGLE-2.

The *frontier* is the deepest level of the tree, whose nodes the draft model has just processed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.conversion import Param
from ..arguments.validation import fake_kernel


class Expansion(NamedTuple):
    """The result of `expand_tree` for F frontier nodes and K children of each.

    Attributes:
        tokens: [B, F, K] int64, the most likely child first; -1 where there is no child.
        scores: [B, F, K] float32, the log-probability of the path to the child; -inf where there is
            no child.
        frontier: [B, K] int64, the next frontier: the K children with the best scores, best first,
            as indices into the F * K children of their sequence.
    """

    tokens: Tensor
    scores: Tensor
    frontier: Tensor


def expand_tree(
    logits: Tensor, scores: Tensor, *, width: int, temperature: Param = 1.0
) -> Expansion:
    """The K most likely children of every frontier node, and the K best among all of these.

    The score of a child is `scores[b, f] + log softmax(logits[b, f] / temperature)[token]`. Tokens
    with equal logits come in ascending order, children with equal scores in the order of their
    index. A node has no children if its score is not finite or its row holds no distribution (NaN,
    +inf or -inf alone), and fewer than K if fewer tokens have a probability. If a sequence has
    fewer than K children in all, the frontier also names missing ones. Their score is -inf, so the
    next level treats them as absent.

    Args:
        logits: [B, F, V] float32, bfloat16 or float16, the draft model's rows at the frontier; the
            last dimension must be contiguous.
        scores: [B, F] float32, the scores of the frontier nodes; -inf marks an absent node.
        width: K, in [1, 64].
        temperature: scalar or [B]; 0 counts as 1, because it would leave one child for each node. A
            tensor value that is negative or not finite leaves its sequence without children.

    Raises:
        RuntimeError: a shape, dtype, device or scalar is out of range; the message names it.
        TypeError: an argument has a wrong type.

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
    conversion.require_tensors(logits=logits, scores=scores)
    conversion.require_integer(width, "width")
    return Expansion(
        *ops.expand_tree.default(
            logits, scores, width, *conversion.vector_and_scalar(temperature, "temperature", 1.0)
        )
    )


@fake_kernel("expand_tree")
def _(
    logits: Tensor, scores: Tensor, width: int, temperatures: Tensor | None, temperature: float
) -> tuple[Tensor, ...]:
    b, f = logits.shape[:2]
    return (
        logits.new_empty((b, f, width), dtype=torch.int64),
        logits.new_empty((b, f, width), dtype=torch.float32),
        logits.new_empty((b, width), dtype=torch.int64),
    )
