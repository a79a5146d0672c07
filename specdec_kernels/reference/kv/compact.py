"""Specification of `kv_compact_` and `paged_compact_`, which keep the accepted path of a tree.

Node n of the tree lies in slot base + n. The j-th node of the path moves to slot base + j, so that
the path follows the prefix without gaps. See docs/rules.md#cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor


def path_moves(base: int, path: list[int], slots: int) -> Iterator[tuple[int, int]]:
    """(from, to) slots of each node of a path, up to the first entry that is no node."""
    for j, node in enumerate(path):
        if node < j or not 0 <= base < slots - node:
            return
        yield base + node, base + j


def kv_compact_(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    for cache in caches:
        for b in range(cache.shape[0]):
            for source, to in path_moves(int(base[b]), path[b].tolist(), cache.shape[2]):
                cache[b, :, to] = cache[b, :, source]


def paged_compact_(
    caches: Sequence[Tensor], block_tables: Tensor, base: Tensor, path: Tensor
) -> None:
    """The same for caches [num_blocks, block_size, ...]; ends at the first missing block."""
    for cache in caches:
        num_blocks, size = cache.shape[:2]
        for b, table in enumerate(block_tables.tolist()):
            for move in path_moves(int(base[b]), path[b].tolist(), size * len(table)):
                (block, at), (to, to_at) = ((table[slot // size], slot % size) for slot in move)
                if not (0 <= block < num_blocks and 0 <= to < num_blocks):
                    break
                cache[to, to_at] = cache[block, at]
