"""`specdec_kernels::tree_attention` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels import _tree_layout_checks as _checks
from specdec_kernels.triton import launch

LONGEST = tl.constexpr(2**62)  # where lengths are clamped: no sum with them overflows
BLOCK = 1024  # slots a step


@triton.jit
def parent_of(parents, n, stride):
    """The parent of node n, int64; -1 where it is the root or out of range."""
    parent = tl.load(parents + n * stride).to(tl.int64)
    return tl.where((parent >= 0) & (parent < n), parent, -1)


@triton.jit(do_not_specialize=["rows", "window"])
def attention_rows(
    parents, parent_stride_b, parent_stride_n, lengths, mask, positions, rows, slots, window,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B * rows,): one row of the mask a program."""
    r = tl.program_id(0).to(tl.int64)
    b = r // rows
    node = r % rows - 1
    parents += b * parent_stride_b
    length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), LONGEST)
    position = length
    n = node
    while n >= 0:
        position += 1
        n = parent_of(parents, n, parent_stride_n)
    tl.store(positions + r, position)
    # Keys at positions below `first` are out of the window.
    first = tl.where(window > 0, position - window + 1, 0)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        visible = (slot < length) & (slot >= first)
        if (start + BLOCK > length) & (start <= length + 1 + node):
            n = node
            at = position
            while at >= tl.maximum(first, length):
                visible = visible | (slot == length + 1 + n)
                at -= 1
                if n >= 0:
                    n = parent_of(parents, n, parent_stride_n)
        tl.store(mask + r * slots + slot, visible, mask=slot < slots)


def tree_attention(
    parents: Tensor, lengths: Tensor, slots: int, window: int
) -> tuple[Tensor, Tensor]:
    """`reference.tree_attention` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    _checks.tree_attention(parents, lengths, slots, window)
    b, n = parents.shape
    mask = parents.new_empty((b, n + 1, slots), dtype=torch.bool)
    positions = parents.new_empty((b, n + 1), dtype=torch.int64)
    (lengths,) = launch.packed(lengths)
    if b:
        with launch.on_device_of(parents):
            attention_rows[(b * (n + 1),)](
                parents, parents.stride(0), parents.stride(1), lengths, mask, positions,
                n + 1, slots, window, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return mask, positions
