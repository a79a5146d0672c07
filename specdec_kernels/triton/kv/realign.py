"""`kv_realign_` in Triton.

A distance counts from the end of the range that moves inwards, in the direction of the shift: the
token at distance d moves to d + step. Distances that differ by a multiple of step form a chain, and
no two chains share a slot. One thread moves one word position of a chain, the farthest token first,
so that no slot is read after it was written, and no other thread accesses that word position.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .. import launch
from . import table as kv_table
from .table import FIELDS, cache_at, sizes_of


@triton.jit
def clamped(slot, slots):
    return tl.minimum(tl.maximum(slot, 0), slots)


@triton.jit
def realigned(start, length, shift, slots):
    """(slot at distance 0, direction, step, how many tokens move, how many slots are vacated).

    Sums may overflow for extreme arguments, but not where the result depends on them.
    """
    begin = clamped(start, slots)
    after = tl.where(length < slots - begin, begin + length, slots)
    end = tl.where(start < 0, clamped(start + length, slots), after)
    size = tl.where((length > 0) & (shift != 0), tl.maximum(end - begin, 0), 0)
    step = tl.where((shift < -slots) | (shift > slots), slots, tl.abs(shift))
    room = tl.where(shift > 0, slots - begin, end) - step
    origin = tl.where(shift > 0, begin, end - 1)
    direction = tl.where(shift > 0, 1, -1)
    moves = tl.minimum(tl.maximum(room, 0), size)
    return origin, direction, tl.maximum(step, 1), moves, tl.minimum(step, size)


@launch.kernel()
def realign_words(
    table, num_caches, starts, start_stride, lengths, length_stride, shifts, shift_stride,
    BYTES: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_caches, blocks): each program moves some words of one sequence's tokens."""
    b = (tl.program_id(0) // num_caches).to(tl.int64)
    fields = table + tl.program_id(0) % num_caches * FIELDS
    cache, head_stride, slot_stride = cache_at(fields, b, BYTES)
    heads, slots, words = sizes_of(fields)
    origin, direction, step, size, vacated = realigned(
        tl.load(starts + b * start_stride).to(tl.int64),
        tl.load(lengths + b * length_stride).to(tl.int64),
        tl.load(shifts + b * shift_stride).to(tl.int64), slots,
    )  # fmt: skip
    total = heads * vacated * words
    cache += origin * slot_stride
    slot_stride *= direction
    stride = tl.num_programs(1).to(tl.int64) * BLOCK
    for first in range(tl.program_id(1).to(tl.int64) * BLOCK, total, stride):
        i = first + tl.arange(0, BLOCK)
        row = i // words
        head = row // vacated
        chain = row - head * vacated
        word = cache + head * head_stride + i - row * words
        inside = i < total
        distance = chain + (size - 1) // step * step
        for _ in range(0, size, step):
            moves = inside & (distance < size)
            token = tl.load(word + distance * slot_stride, mask=moves)
            tl.store(word + (distance + step) * slot_stride, token, mask=moves)
            distance -= step
        if ZERO:
            zeros = tl.zeros([BLOCK], word.dtype.element_ty)
            tl.store(word + chain * slot_stride, zeros, mask=inside)


def kv_realign_(
    caches: Sequence[Tensor], starts: Tensor, lengths: Tensor, shifts: Tensor, zero_fill: bool
) -> None:
    """`reference.kv_realign_` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    with launch.on_device_of(starts):
        for group in kv_table.groups_of(starts.device, caches):
            kv_table.start(
                realign_words, group, starts.shape[0], group.typical_slots, starts,
                starts.stride(0), lengths, lengths.stride(0), shifts, shifts.stride(0),
                ZERO=zero_fill,
            )  # fmt: skip
