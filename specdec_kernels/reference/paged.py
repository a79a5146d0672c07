"""Specification of the ops on paged caches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec_kernels import _kv_checks
from specdec_kernels.reference.kv import path_moves


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
