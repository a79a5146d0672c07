"""Specification of `paged_truncate_`; see docs/rules.md#cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ...arguments.in_place import read_first


def paged_truncate_(
    block_tables: Tensor, lengths: Tensor, new_lengths: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Takes blocks that hold no token any more out of the tables and returns them.

    Returns the freed blocks of each sequence [B, M], filled up with -1, and their number.
    """
    (new_lengths,) = read_first([new_lengths], [lengths])
    blocks = torch.full_like(block_tables, -1)
    num_freed = torch.zeros(lengths.shape, dtype=torch.int32)
    for b in range(lengths.shape[0]):
        old = max(int(lengths[b]), 0)
        new = max(0, min(old, int(new_lengths[b])))
        lengths[b] = new
        begin, end = (-(-n // block_size) for n in (new, old))
        freed = [block for block in block_tables[b, begin:end].tolist() if block >= 0]
        block_tables[b, begin:end] = -1
        blocks[b, : len(freed)] = torch.tensor(freed, dtype=blocks.dtype)
        num_freed[b] = len(freed)
    return blocks, num_freed
