"""The layout of token trees: who sees whom, the best nodes of a tree, prefix trees.

A tree of N nodes a sequence hangs below a root, the pending token: the last committed one, not yet
in the cache. `parents[b, n]` is in [-1, n), and -1 is a child of the root; a parent outside this
range counts as -1. `tokens[b, n]` of -1 is an absent node, with all that hangs below it. One pass
of the target feeds N+1 tokens: row 0 is the root, row n+1 is node n. The root goes to cache slot
`lengths[b]`, node n to `lengths[b] + 1 + n`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import _tree_layout_checks as _checks


class TreeAttention(NamedTuple):
    """What `tree_attention` returns.

    mask: [B, N+1, S] bool, True where the row (root, then nodes) sees the slot.
    positions: [B, N+1] int64, `lengths[b]` + depth; the root has depth 0.
    """

    mask: Tensor
    positions: Tensor


def tree_attention(
    parents: Tensor, lengths: Tensor, *, slots: int, window: int = 0
) -> TreeAttention:
    """The attention mask and the positions with which a target scores a tree in one pass.

    Every row sees the committed prefix (slots below `lengths[b]`), the root, its own ancestors and
    itself. A node whose token is absent has a row like any other.

    Args:
        parents: [B, N] int32 or int64.
        lengths: [B] int64, committed tokens in the cache; a negative one counts as 0.
        slots: S, the slots of the cache that the mask covers; `lengths[b] + N + 1` at least, for
            what lies beyond is in nobody's sight.
        window: of sliding attention: a row sees only keys whose position is greater than its own
            minus `window`; 0 sees all. Slot s of the prefix has position s.

    Raises:
        RuntimeError: a shape, dtype, device or size out of range, with its name and value.

    Source: the tree attention of SpecInfer (arXiv 2305.09781, section 4.2) and Medusa.

    >>> mask, positions = tree_attention(torch.tensor([[-1, -1, 0]]), torch.tensor([1]), slots=5)
    >>> mask[0].int()
    tensor([[1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [1, 1, 1, 0, 1]], dtype=torch.int32)
    >>> positions
    tensor([[1, 2, 2, 3]])
    """
    return TreeAttention(
        *torch.ops.specdec_kernels.tree_attention.default(parents, lengths, slots, window)
    )


@torch.library.register_fake("specdec_kernels::tree_attention")
def _(parents: Tensor, lengths: Tensor, slots: int, window: int) -> tuple[Tensor, ...]:
    _checks.tree_attention(parents, lengths, slots, window)
    b, n = parents.shape
    return (
        parents.new_empty((b, n + 1, slots), dtype=torch.bool),
        parents.new_empty((b, n + 1), dtype=torch.int64),
    )
