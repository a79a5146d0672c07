"""Specification of `kv_append_`.

A *slot* is the place of one token in a cache [B, heads, slots, channels]. The cache ops write in
place; they take lists of caches because one call serves the keys and values of all layers. See
docs/rules.md#cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...arguments.in_place import read_first


def kv_append_(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    """Writes entries from slot positions[b] on; slots outside the cache are skipped.

    Entries may lie in a cache: all are read before any is written.
    """
    for cache, new in zip(caches, read_first(entries, caches), strict=True):
        for b in range(cache.shape[0]):
            for j in range(new.shape[2]):
                slot = int(positions[b]) + j
                if 0 <= slot < cache.shape[2]:
                    cache[b, :, slot] = new[b, :, j]
