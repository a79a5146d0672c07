"""Specification of `kv_realign_`; see docs/rules.md#cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def kv_realign_(
    caches: Sequence[Tensor], starts: Tensor, lengths: Tensor, shifts: Tensor, zero_fill: bool
) -> None:
    """Moves slots [start, start + length) of each sequence by its shift.

    Slots that would leave the cache are dropped; `zero_fill` clears the slots that were left.
    """
    for cache in caches:
        slots = range(cache.shape[2])
        for b in range(cache.shape[0]):
            start, shift = int(starts[b]), int(shifts[b])
            old = cache[b].clone()
            moved = [s for s in slots if start <= s < start + int(lengths[b])]
            for slot in moved if zero_fill else ():
                cache[b, :, slot] = 0
            for slot in moved:
                if slot + shift in slots:
                    cache[b, :, slot + shift] = old[:, slot]
