"""Cache ops and `ngram_propose` by PyTorch's own indexing, for devices without kernels of ours.

They have the signatures of `torch.ops.specdec_kernels`, run on any device and never make the host
wait for it. A slot that is not to be written is not left out, because the number of the others is
known on the device only: it is written with the same entry as one that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments.in_place import read_first
from .arguments.validation import validate

__all__ = ["implementation"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def implementation(op: str) -> Callable[..., Any]:
    """The function of this module for an op, with the op's validation before it."""

    @torch.no_grad()
    def call(*args: Any) -> Any:
        validate(op, args)
        return globals()[op](*([*map(_bits, a)] if isinstance(a, Sequence) else a for a in args))

    return call


def _bits(t: Tensor) -> Tensor:
    """The bits of a cache or of its entries as integers, which every op of PyTorch can move."""
    return t.view(_INTEGERS.get(t.itemsize, t.dtype))


def _count(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.int64)[:, None]


def _write(cache: Tensor, first: Tensor, second: Tensor, entries: Tensor, valid: Tensor) -> None:
    """`cache[first, second] = entries` where valid. All are [n], entries [n, ...]."""
    if not valid.numel() or not cache.numel():
        return
    # The first valid one, if there is one. An index without dimensions would be read on the host.
    other = valid.to(torch.uint8).argmax(0, keepdim=True)
    some = valid[other]
    shape = (-1,) + (1,) * (entries.dim() - 1)
    rest = torch.where(some.view(shape), entries[other], cache[0, 0])
    first, second = (
        torch.where(valid, index, torch.where(some, index[other], 0)) for index in (first, second)
    )
    cache[first, second] = torch.where(valid.view(shape), entries, rest)


def _write_slots(cache: Tensor, slots: Tensor, entries: Tensor, valid: Tensor) -> None:
    """Write entries [B, n, H, D] to slots [B, n] of a cache [B, S, H, D]."""
    b = _count(len(slots), slots)[:, None].expand_as(slots)
    slots = torch.where(valid, slots, 0)
    _write(cache, b.flatten(), slots.flatten(), entries.flatten(0, 1), valid.flatten())


def _blocks(cache: Tensor, tables: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(blocks, slots in them, whether these exist) of slots [B, n] of a paged cache."""
    size, columns = cache.shape[1], tables.shape[1]
    there = (slots >= 0) & (slots < size * columns)
    slots = torch.where(there, slots, 0)
    blocks = tables.to(torch.int64).gather(1, slots // size)
    there &= (blocks >= 0) & (blocks < len(cache))
    return torch.where(there, blocks, 0), slots % size, there


def kv_append_(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    for cache, new in zip(caches, read_first(entries, caches), strict=True):
        n, size = new.shape[2], cache.shape[2]
        slots = _wide(positions).clamp(-n, size) + _count(n, positions)
        valid = (slots >= 0) & (slots < size)
        _write_slots(cache.transpose(1, 2), slots, new.transpose(1, 2), valid)


def paged_append_(
    caches: Sequence[Tensor],
    entries: Sequence[Tensor],
    block_tables: Tensor,
    positions: Tensor,
    counts: Tensor | None,
) -> None:
    if not block_tables.numel():
        return
    for cache, new in zip(caches, read_first(entries, caches), strict=True):
        if not cache.numel():
            continue
        n, j = new.shape[1], _count(new.shape[1], positions)
        reach = cache.shape[1] * block_tables.shape[1]
        slots = _wide(positions).clamp(-n, reach) + j
        blocks, slots, valid = _blocks(cache, block_tables, slots)
        if counts is not None:
            valid &= j < _wide(counts)
        _write(cache, blocks.flatten(), slots.flatten(), new.flatten(0, 1), valid.flatten())


def _path(base: Tensor, path: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """(from, to, valid) slots of each node of a path, up to the first entry that is no node."""
    start, node, j = _wide(base), path.to(torch.int64), _count(path.shape[1], path)
    # No path moves a node to a later place.
    valid = (node >= j) & (start >= 0) & (start < slots - node)
    valid = valid.to(torch.int32).cumprod(1).to(torch.bool)
    return torch.where(valid, start + node, 0), torch.where(valid, start + j, 0), valid


def kv_compact_(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    b = _count(len(base), base)[:, None]
    for cache in caches:
        if cache.numel():
            source, to, valid = _path(base, path, cache.shape[2])
            view = cache.transpose(1, 2)
            _write_slots(view, to, view[b, source], valid)


def paged_compact_(
    caches: Sequence[Tensor], block_tables: Tensor, base: Tensor, path: Tensor
) -> None:
    if not block_tables.numel():
        return
    for cache in caches:
        if not cache.numel():
            continue
        source, to, valid = _path(base, path, cache.shape[1] * block_tables.shape[1])
        from_block, from_slot, found = _blocks(cache, block_tables, source)
        block, slot, there = _blocks(cache, block_tables, to)
        valid = (valid & found & there).to(torch.int32).cumprod(1).to(torch.bool)
        moved = cache[from_block, from_slot].flatten(0, 1)
        _write(cache, block.flatten(), slot.flatten(), moved, valid.flatten())


def _shorten(lengths: Tensor, new_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Shorten `lengths` in place -> the old and the new ones [B, 1], int64."""
    old = _wide(lengths).clamp(min=0)
    new = torch.minimum(old, _wide(new_lengths)).clamp(min=0)
    lengths.copy_(new[:, 0])
    return old, new


def _clear(cache: Tensor, dropped: Tensor) -> None:
    """Write zeros to the slots of a cache [B, H, S, D] that a mask [B, S] names."""
    cache.masked_fill_(dropped[:, None, :, None], 0)


def kv_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, zero_fill: bool
) -> None:
    old, new = _shorten(lengths, new_lengths)
    for cache in caches if zero_fill else ():
        slot = _count(cache.shape[2], lengths)
        _clear(cache, (slot >= new) & (slot < old))


def ring_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, window: int, zero_fill: bool
) -> Tensor:
    old, new = _shorten(lengths, new_lengths)
    slots = min((cache.shape[2] for cache in caches), default=0)
    lost = (new > 0) & ((new - window).clamp(min=0) < old - slots)
    for cache in caches if zero_fill and slots else ():
        slot = _count(cache.shape[2], lengths)
        token = old - 1 - (old - 1 - slot) % cache.shape[2]  # the one that a slot holds
        _clear(cache, (token >= 0) & (token >= new))
    return (lost[:, 0] & (slots > 0)).to(torch.int32)


def paged_truncate_(
    block_tables: Tensor, lengths: Tensor, new_lengths: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    old, new = _shorten(lengths, new_lengths)
    begin, end = (n // block_size + (n % block_size != 0) for n in (new, old))
    b, columns = block_tables.shape
    column = _count(columns, lengths)
    dropped = (column >= begin) & (column < end)
    freed = dropped & (block_tables >= 0)
    # Blocks that stay are written behind the last column, which is cut off.
    place = torch.where(freed, freed.cumsum(1) - 1, columns)
    blocks = block_tables.new_full((b, columns + 1), -1).scatter_(1, place, block_tables)
    block_tables.masked_fill_(dropped, -1)
    return blocks[:, :columns].contiguous(), freed.sum(1, dtype=torch.int32)


def kv_realign_(
    caches: Sequence[Tensor], starts: Tensor, lengths: Tensor, shifts: Tensor, zero_fill: bool
) -> None:
    b = _count(len(starts), starts)[:, None]
    start, length = _wide(starts), _wide(lengths).clamp(min=0)
    for cache in caches:
        size = cache.shape[2]
        if not cache.numel():
            continue
        begin = start.clamp(0, size)
        # No sum overflows: a negative start takes any length, another at most `size`.
        end = torch.where(start < 0, start + length, begin + length.clamp(max=size)).clamp(0, size)
        slot = _count(size, starts)
        source = slot - _wide(shifts).clamp(-size, size)
        moved = (source >= begin) & (source < end)
        view = cache.transpose(1, 2)
        view.copy_(view[b, torch.where(moved, source, slot)])
        if zero_fill:
            _clear(cache, (slot >= begin) & (slot < end) & ~moved)


def ngram_propose(
    history: Tensor, lengths: Tensor, gamma: int, max_ngram: int, min_ngram: int
) -> tuple[Tensor, Tensor]:
    b, columns = history.shape
    if not columns:
        return history.new_full((b, gamma), -1), history.new_zeros((b,), dtype=torch.int32)
    length = _wide(lengths)
    length = torch.where((length >= 0) & (length <= columns), length, 0)
    end = _count(columns, history).expand(b, columns)
    size = torch.zeros_like(end)
    going = end < length - 1
    for n in range(min(max_ngram, columns)):
        last = history.gather(1, (length - 1 - n).clamp(min=0))
        going = going & (end >= n) & (history.gather(1, (end - n).clamp(min=0)) == last)
        size += going
    # The longer of two matches is better; of equally long ones, the later.
    best = (size * columns + end).argmax(1, keepdim=True)
    found = (size.gather(1, best) >= min_ngram) & (length > 0)
    start = best + 1
    period = torch.where(found, length - start, 1)
    at = start + _count(gamma, history) % period
    tokens = history.gather(1, at.clamp(max=columns - 1))
    return torch.where(found, tokens, -1), found[:, 0].to(torch.int32) * gamma
