"""`kv_compact_` and `paged_compact_` in Triton.

One thread moves one word position of a head and goes through the path in order. No slot is read
after it was written, because path[j] >= j, and no other thread accesses that word position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .. import launch
from . import table as kv_table
from .table import FIELDS, SEQUENCE_STRIDE, cache_at, sizes_of


@triton.jit
def place_of(
    slot, inside, b, slots, tables, table_stride_b, table_stride_m, num_blocks,
    block_stride, slot_stride, PAGED: tl.constexpr,
):  # fmt: skip
    """(offset of a slot in words from the start of the cache, whether the slot exists)."""
    if PAGED:
        column = tl.where(inside, slot, 0) // slots
        block = tl.load(tables + b * table_stride_b + column * table_stride_m).to(tl.int64)
        found = inside & (block >= 0) & (block < num_blocks)
        place = block * block_stride + (slot - column * slots) * slot_stride
    else:
        found = inside
        place = b * block_stride + slot * slot_stride
    return place, found


@launch.kernel()
def compact_words(
    table, num_caches, base, base_stride, path, path_stride_b, path_stride_p, path_length,
    tables, table_stride_b, table_stride_m, columns, num_blocks,
    BYTES: tl.constexpr, BLOCK: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_caches, blocks): each program moves some words of one sequence's tokens."""
    b = (tl.program_id(0) // num_caches).to(tl.int64)
    fields = table + tl.program_id(0) % num_caches * FIELDS
    cache, head_stride, slot_stride = cache_at(fields, 0, BYTES)
    block_stride = tl.load(fields + SEQUENCE_STRIDE)
    heads, slots, words = sizes_of(fields)
    first = tl.load(base + b * base_stride).to(tl.int64)
    reach = slots * columns if PAGED else slots
    room = tl.where(first < 0, 0, reach - first)  # nodes below it have slots
    path += b * path_stride_b
    total = heads * words
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, total, step):
        i = start + tl.arange(0, BLOCK)
        head = i // words
        word = cache + head * head_stride + i - head * words
        j = tl.full([], 0, tl.int64)
        while j < path_length:
            node = tl.load(path + j * path_stride_p).to(tl.int64)
            inside = (node >= j) & (node < room)
            source, found = place_of(
                first + node, inside, b, slots, tables, table_stride_b, table_stride_m,
                num_blocks, block_stride, slot_stride, PAGED,
            )  # fmt: skip
            to, there = place_of(
                first + j, inside, b, slots, tables, table_stride_b, table_stride_m,
                num_blocks, block_stride, slot_stride, PAGED,
            )  # fmt: skip
            moves = i < tl.where(found & there & (node != j), total, 0)
            tl.store(word + to, tl.load(word + source, mask=moves), mask=moves)
            j = tl.where(found & there, j + 1, path_length)


def _compact(caches: Sequence[Tensor], base: Tensor, path: Tensor, slot: int, *tables: Any) -> None:
    if path.shape[1] == 0:
        return
    with launch.on_device_of(base):
        for group in kv_table.groups_of(base.device, caches, slot=slot):
            kv_table.start(
                compact_words, group, base.shape[0], 1, base, base.stride(0), path,
                path.stride(0), path.stride(1), path.shape[1], *tables, PAGED=slot == 1,
            )  # fmt: skip


def kv_compact_(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    """`reference.kv_compact_` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    _compact(caches, base, path, 2, None, 0, 0, 1, 0)


def paged_compact_(
    caches: Sequence[Tensor], block_tables: Tensor, base: Tensor, path: Tensor
) -> None:
    """`reference.paged_compact_` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    if base.shape[0] == 0 or not caches or block_tables.shape[1] == 0:
        return
    _compact(
        caches, base, path, 1, block_tables, block_tables.stride(0), block_tables.stride(1),
        block_tables.shape[1], caches[0].shape[0],
    )  # fmt: skip
