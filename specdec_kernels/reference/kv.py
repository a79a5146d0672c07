"""Specification of the cache ops."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec_kernels import _checks


def kv_append_(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    """Specification of `specdec_kernels::kv_append_`."""
    _checks.kv_append_(caches, entries, positions)
    for cache, new in zip(caches, entries, strict=True):
        for b in range(cache.shape[0]):
            for j in range(new.shape[2]):
                slot = int(positions[b]) + j
                if 0 <= slot < cache.shape[2]:
                    cache[b, :, slot] = new[b, :, j]


def kv_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, zero_fill: bool
) -> None:
    """Specification of `specdec_kernels::kv_truncate_`."""
    _checks.kv_truncate_(caches, lengths, new_lengths)
    for b in range(lengths.shape[0]):
        old = int(lengths[b])
        new = max(0, min(old, int(new_lengths[b])))
        lengths[b] = new
        for cache in caches if zero_fill else ():
            cache[b, :, new : max(old, 0)] = 0
