"""`paged_truncate_` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...arguments.in_place import read_first
from .. import launch
from .truncate import truncated_length

# Columns of one step: at least as many as a warp has threads, so that no two threads read one.
BLOCK = 128
OPTIONS = {"num_warps": 1}


@triton.jit
def needed_blocks(tokens, block_size, columns):
    whole = tokens // block_size
    return tl.minimum(whole + (whole * block_size != tokens).to(tl.int64), columns)


@launch.kernel("table_stride_m")
def truncate_tables(
    tables, table_stride_b, table_stride_m, columns, block_size, lengths, length_stride,
    new_lengths, new_length_stride, blocks, num_freed, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B,): each program drops the blocks of one sequence that it no longer needs."""
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + b * length_stride).to(tl.int64)
    new_length = tl.load(new_lengths + b * new_length_stride).to(tl.int64)
    kept = truncated_length(length, new_length)
    begin = needed_blocks(kept, block_size, columns)
    end = needed_blocks(tl.maximum(length, 0), block_size, columns)
    out = blocks + b * columns
    count = tl.full([], 0, tl.int32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < end
        entry = tables + b * table_stride_b + column * table_stride_m
        block = tl.load(entry, mask=inside, other=-1)
        freed = (block >= 0).to(tl.int32)
        tl.store(out + count + tl.cumsum(freed, 0) - 1, block, mask=block >= 0)
        tl.store(entry, tl.full([BLOCK], -1, tl.int32), mask=inside)
        count += tl.sum(freed, 0)
    for start in range(count, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(out + column, tl.full([BLOCK], -1, tl.int32), mask=column < columns)
    # Wait until every thread has read the length.
    tl.debug_barrier()
    tl.store(num_freed + b, count)
    tl.store(lengths + b * length_stride, kept)


def paged_truncate_(
    block_tables: Tensor, lengths: Tensor, new_lengths: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """`reference.paged_truncate_` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    (new_lengths,) = read_first([new_lengths], [lengths])
    batch, columns = block_tables.shape
    blocks = block_tables.new_empty((batch, columns))
    num_freed = block_tables.new_empty((batch,), dtype=torch.int32)
    if batch:
        with launch.on_device_of(lengths):
            truncate_tables[(batch,)](
                block_tables, block_tables.stride(0), block_tables.stride(1), columns, block_size,
                lengths, lengths.stride(0), new_lengths, new_lengths.stride(0), blocks, num_freed,
                BLOCK=BLOCK, **OPTIONS,
            )  # fmt: skip
    return blocks, num_freed
