"""Specification of the small tree ops."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import _tree_layout_checks as _checks

LONGEST = 2**62  # where lengths are clamped: no sum with them overflows


def valid_parents(parents: Tensor) -> Tensor:
    """[B, N] int64: what lies outside [-1, n) counts as -1."""
    parents = parents.to(torch.int64)
    inside = (parents >= 0) & (parents < torch.arange(parents.shape[1]))
    return torch.where(inside, parents, -1)


def tree_attention(
    parents: Tensor, lengths: Tensor, slots: int, window: int
) -> tuple[Tensor, Tensor]:
    """Specification of `specdec_kernels::tree_attention`."""
    _checks.tree_attention(parents, lengths, slots, window)
    b, n = parents.shape
    parents, lengths = valid_parents(parents), lengths.clamp(0, LONGEST)
    sees = torch.zeros(b, n + 1, n + 1, dtype=torch.bool)  # row, row
    sees[:, 0, 0] = True
    for row in range(1, n + 1):
        sees[:, row] = sees[torch.arange(b), parents[:, row - 1] + 1]
        sees[:, row, row] = True
    positions = lengths[:, None] + sees.sum(-1) - 1

    slot = torch.arange(slots).expand(b, slots)
    row_of = slot - lengths[:, None]  # which row of the tree a slot holds
    of_tree = (row_of >= 0) & (row_of <= n)
    row_of = torch.where(of_tree, row_of, 0)
    key_positions = torch.where(of_tree, positions.gather(1, row_of), slot)
    mask = sees.gather(2, row_of[:, None].expand(b, n + 1, slots)) & of_tree[:, None]
    mask |= (slot < lengths[:, None])[:, None]
    if window:
        mask &= key_positions[:, None] > positions[..., None] - window
    return mask, positions
