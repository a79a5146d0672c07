"""Specification of `paged_append_`; see docs/rules.md#cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...arguments.in_place import read_first


def paged_append_(
    caches: Sequence[Tensor],
    entries: Sequence[Tensor],
    block_tables: Tensor,
    positions: Tensor,
    counts: Tensor | None,
) -> None:
    """Writes entries from slot positions[b] on; a slot that has no block is skipped.

    Entries may lie in a cache: all are read before any is written.
    """
    for cache, new in zip(caches, read_first(entries, caches), strict=True):
        num_blocks, size = cache.shape[:2]
        for b, table in enumerate(block_tables.tolist()):
            for j in range(new.shape[1] if counts is None else min(int(counts[b]), new.shape[1])):
                slot = int(positions[b]) + j
                if 0 <= slot < size * len(table) and 0 <= table[slot // size] < num_blocks:
                    cache[table[slot // size], slot % size] = new[b, j]
