"""Specification of the cache ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdec_kernels.arguments import kv as _kv_checks


def kv_append_(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    """Specification of `specdec_kernels::kv_append_`."""
    _kv_checks.kv_append_(caches, entries, positions)
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
    _kv_checks.kv_truncate_(caches, lengths, new_lengths)
    for b in range(lengths.shape[0]):
        old = int(lengths[b])
        new = max(0, min(old, int(new_lengths[b])))
        lengths[b] = new
        for cache in caches if zero_fill else ():
            cache[b, :, new : max(old, 0)] = 0


def path_moves(base: int, path: list[int], slots: int) -> Iterator[tuple[int, int]]:
    """(from, to) of each token of an accepted path, up to the first entry that is none."""
    for j, node in enumerate(path):
        if node < j or not 0 <= base < slots - node:
            return
        yield base + node, base + j


def kv_compact_(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    """Specification of `specdec_kernels::kv_compact_`."""
    _kv_checks.kv_compact_(caches, base, path)
    for cache in caches:
        for b in range(cache.shape[0]):
            for source, to in path_moves(int(base[b]), path[b].tolist(), cache.shape[2]):
                cache[b, :, to] = cache[b, :, source]


def kv_realign_(
    caches: Sequence[Tensor], starts: Tensor, lengths: Tensor, shifts: Tensor, zero_fill: bool
) -> None:
    """Specification of `specdec_kernels::kv_realign_`."""
    _kv_checks.kv_realign_(caches, starts, lengths, shifts)
    for cache in caches:
        slots = range(cache.shape[2])
        for b in range(cache.shape[0]):
            start, shift = int(starts[b]), int(shifts[b])
            old = cache[b].clone()
            held = [s for s in slots if start <= s < start + int(lengths[b])]
            for slot in held if zero_fill else ():
                cache[b, :, slot] = 0
            for slot in held:
                if slot + shift in slots:
                    cache[b, :, slot + shift] = old[:, slot]


def ring_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, window: int, zero_fill: bool
) -> Tensor:
    """Specification of `specdec_kernels::ring_truncate_`."""
    _kv_checks.ring_truncate_(caches, lengths, new_lengths, window)
    status = torch.zeros(lengths.shape, dtype=torch.int32)
    for b in range(lengths.shape[0]):
        old = max(int(lengths[b]), 0)
        new = max(0, min(old, int(new_lengths[b])))
        lengths[b] = new
        for cache in caches:
            slots = cache.shape[2]
            # A slot holds the last token that was written to it, if any was.
            holds = {t % slots: t for t in range(max(old - slots, 0), old)}
            if any(holds[t % slots] != t for t in range(max(new - window, 0), new)):
                status[b] = 1
            for slot in (s for s, t in holds.items() if zero_fill and t >= new):
                cache[b, :, slot] = 0
    return status
