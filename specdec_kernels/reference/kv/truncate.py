"""Specification of `kv_truncate_`; see docs/rules.md#cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...arguments.in_place import read_first


def kv_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, zero_fill: bool
) -> None:
    """Shortens each sequence to its new length, which may not make it longer."""
    (new_lengths,) = read_first([new_lengths], [lengths])
    for b in range(lengths.shape[0]):
        old = int(lengths[b])
        new = max(0, min(old, int(new_lengths[b])))
        lengths[b] = new
        for cache in caches if zero_fill else ():
            cache[b, :, new : max(old, 0)] = 0
