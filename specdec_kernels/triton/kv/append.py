"""`kv_append_` in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...arguments.in_place import read_first
from .. import launch
from . import table as kv_table
from .table import COUNT, ENTRIES, FIELDS, cache_at, sizes_of


@triton.jit
def kept_entries(position, count, slots):
    """(first, how many) of `count` entries whose slot is in [0, slots).

    Sums may overflow for extreme positions, but not where the result depends on them.
    """
    begin = tl.where(position < 0, -position, 0)
    size = tl.minimum(count, slots - position) - begin
    return begin, tl.where((position < slots) & (position > -count), size, 0)


@launch.kernel()
def append_words(
    table, num_caches, positions, position_stride, BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (B * num_caches, blocks): each program copies words of one sequence's entries."""
    b = (tl.program_id(0) // num_caches).to(tl.int64)
    fields = table + tl.program_id(0) % num_caches * FIELDS
    cache, head_stride, slot_stride = cache_at(fields, b, BYTES)
    entries, entry_head, entry_slot = cache_at(fields + ENTRIES, b, BYTES)
    heads, slots, words = sizes_of(fields)
    position = tl.load(positions + b * position_stride).to(tl.int64)
    begin, size = kept_entries(position, tl.load(fields + COUNT), slots)
    total = heads * size * words
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, total, step):
        i = start + tl.arange(0, BLOCK)
        token = i // words
        head = token // size
        entry = begin + token - head * size
        word = i - token * words
        source = entries + head * entry_head + entry * entry_slot + word
        to = cache + head * head_stride + (position + entry) * slot_stride + word
        tl.store(to, tl.load(source, mask=i < total), mask=i < total)


def kv_append_(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    """`reference.kv_append_` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    entries = read_first(entries, caches)
    with launch.on_device_of(positions):
        for group in kv_table.groups_of(positions.device, caches, entries):
            kv_table.start(
                append_words, group, positions.shape[0], group.entries,
                positions, positions.stride(0),
            )  # fmt: skip
