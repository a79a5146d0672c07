"""`kv_truncate_` in Triton, and the parts that `ring_truncate_` and `paged_truncate_` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...arguments.in_place import read_first
from .. import launch
from . import table as kv_table
from .table import FIELDS, cache_at, sizes_of

LENGTHS = 128  # sequences that one program shortens


@triton.jit
def truncated_length(length, new_length):
    return tl.maximum(tl.minimum(length, new_length), 0)


@triton.jit
def dropped_slots(length, new_length, slots, RING: tl.constexpr):
    """(first, how many) of the slots that truncation drops; those of a ring wrap around to slot 0.

    Sums may overflow for extreme lengths, but not where the result depends on them.
    """
    begin = truncated_length(length, new_length)
    if RING:
        first = tl.maximum(begin, length - slots)
        size = tl.where(length > begin, length - first, 0)
        begin = tl.where(size > 0, first, 0) % slots
    else:
        size = tl.maximum(tl.minimum(length, slots) - begin, 0)
    return begin, size


@launch.kernel()
def zero_words(
    table, num_caches, lengths, length_stride, new_lengths, new_length_stride,
    BYTES: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_caches, blocks): write zeros to the slots that truncation drops."""
    b = (tl.program_id(0) // num_caches).to(tl.int64)
    fields = table + tl.program_id(0) % num_caches * FIELDS
    cache, head_stride, slot_stride = cache_at(fields, b, BYTES)
    heads, slots, words = sizes_of(fields)
    length = tl.load(lengths + b * length_stride).to(tl.int64)
    new_length = tl.load(new_lengths + b * new_length_stride).to(tl.int64)
    begin, size = dropped_slots(length, new_length, slots, RING)
    total = heads * size * words
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, total, step):
        i = start + tl.arange(0, BLOCK)
        token = i // words
        head = token // size
        slot = begin + token - head * size
        slot = tl.where(slot < slots, slot, slot - slots)
        to = cache + head * head_stride + slot * slot_stride + i - token * words
        tl.store(to, tl.zeros([BLOCK], to.dtype.element_ty), mask=i < total)


@launch.kernel()
def shorten(
    lengths, length_stride, new_lengths, new_length_stride, batch, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + b * length_stride, mask=b < batch).to(tl.int64)
    new_length = tl.load(new_lengths + b * new_length_stride, mask=b < batch).to(tl.int64)
    tl.store(lengths + b * length_stride, truncated_length(length, new_length), mask=b < batch)


def zero_dropped(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, **constants: Any
) -> None:
    """Must be launched before `shorten`, because its programs read the old lengths."""
    for group in kv_table.groups_of(lengths.device, caches):
        kv_table.start(
            zero_words, group, lengths.shape[0], group.typical_slots,
            lengths, lengths.stride(0), new_lengths, new_lengths.stride(0), **constants,
        )  # fmt: skip


def kv_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, zero_fill: bool
) -> None:
    """`reference.kv_truncate_` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    (new_lengths,) = read_first([new_lengths], [lengths])
    batch = lengths.shape[0]
    if batch == 0:
        return
    with launch.on_device_of(lengths):
        if zero_fill:
            zero_dropped(caches, lengths, new_lengths, RING=False)
        shorten[(triton.cdiv(batch, LENGTHS),)](
            lengths, lengths.stride(0), new_lengths, new_lengths.stride(0), batch, BLOCK=LENGTHS,
        )  # fmt: skip
