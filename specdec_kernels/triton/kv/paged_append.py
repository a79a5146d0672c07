"""`paged_append_` in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from ...arguments.in_place import read_first
from .. import launch
from . import table as kv_table
from .append import kept_entries
from .compact import place_of
from .table import COUNT, ENTRIES, FIELDS, SEQUENCE_STRIDE, cache_at, sizes_of


@launch.kernel()
def paged_append_words(
    table, num_caches, positions, position_stride, counts, count_stride,
    tables, table_stride_b, table_stride_m, columns, num_blocks,
    BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_caches, blocks): each program copies words of one sequence's entries."""
    b = (tl.program_id(0) // num_caches).to(tl.int64)
    fields = table + tl.program_id(0) % num_caches * FIELDS
    cache, head_stride, slot_stride = cache_at(fields, 0, BYTES)
    block_stride = tl.load(fields + SEQUENCE_STRIDE)
    entries, entry_head, entry_slot = cache_at(fields + ENTRIES, b, BYTES)
    heads, slots, words = sizes_of(fields)
    position = tl.load(positions + b * position_stride).to(tl.int64)
    count = tl.load(fields + COUNT)
    if counts is not None:
        asked = tl.load(counts + b * count_stride).to(tl.int64)
        count = tl.minimum(count, tl.maximum(asked, 0))
    begin, size = kept_entries(position, count, slots * columns)
    total = heads * size * words
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, total, step):
        i = start + tl.arange(0, BLOCK)
        token = i // words
        head = token // size
        entry = begin + token - head * size
        word = i - token * words
        place, found = place_of(
            position + entry, i < total, b, slots, tables, table_stride_b, table_stride_m,
            num_blocks, block_stride, slot_stride, True,
        )  # fmt: skip
        source = entries + head * entry_head + entry * entry_slot + word
        to = cache + head * head_stride + place + word
        tl.store(to, tl.load(source, mask=found), mask=found)


def paged_append_(
    caches: Sequence[Tensor],
    entries: Sequence[Tensor],
    block_tables: Tensor,
    positions: Tensor,
    counts: Tensor | None,
) -> None:
    """`reference.paged_append_` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    if positions.shape[0] == 0 or not caches or block_tables.shape[1] == 0:
        return
    entries = read_first(entries, caches)
    with launch.on_device_of(positions):
        for group in kv_table.groups_of(positions.device, caches, entries, slot=1):
            kv_table.start(
                paged_append_words, group, positions.shape[0], group.entries,
                positions, positions.stride(0), counts, 0 if counts is None else counts.stride(0),
                block_tables, block_tables.stride(0), block_tables.stride(1),
                block_tables.shape[1], caches[0].shape[0],
            )  # fmt: skip
