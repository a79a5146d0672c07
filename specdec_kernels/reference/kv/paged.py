"""Specification of the ops on paged caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.arguments import kv as _kv_checks
from specdec_kernels.reference.kv.dense import path_moves


def paged_compact_(
    caches: Sequence[Tensor], block_tables: Tensor, base: Tensor, path: Tensor
) -> None:
    """Specification of `specdec_kernels::paged_compact_`."""
    _kv_checks.paged_compact_(caches, block_tables, base, path)
    for cache in caches:
        num_blocks, size = cache.shape[:2]
        for b, table in enumerate(block_tables.tolist()):
            for move in path_moves(int(base[b]), path[b].tolist(), size * len(table)):
                (block, at), (to, to_at) = ((table[slot // size], slot % size) for slot in move)
                if not (0 <= block < num_blocks and 0 <= to < num_blocks):
                    break
                cache[to, to_at] = cache[block, at]


def paged_truncate_(
    block_tables: Tensor, lengths: Tensor, new_lengths: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Specification of `specdec_kernels::paged_truncate_`."""
    _kv_checks.paged_truncate_(block_tables, lengths, new_lengths, block_size)
    blocks = torch.full(block_tables.shape, -1, dtype=torch.int32)
    num_freed = torch.zeros(lengths.shape, dtype=torch.int32)
    for b in range(lengths.shape[0]):
        old = max(int(lengths[b]), 0)
        new = max(0, min(old, int(new_lengths[b])))
        lengths[b] = new
        begin, end = (-(-n // block_size) for n in (new, old))
        freed = [block for block in block_tables[b, begin:end].tolist() if block >= 0]
        block_tables[b, begin:end] = -1
        blocks[b, : len(freed)] = torch.tensor(freed, dtype=torch.int32)
        num_freed[b] = len(freed)
    return blocks, num_freed
