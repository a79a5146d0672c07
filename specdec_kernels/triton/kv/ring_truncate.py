"""`ring_truncate_` in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...arguments.in_place import read_first
from .. import launch
from .truncate import LENGTHS, truncated_length, zero_dropped


@launch.kernel()
def shorten_rings(
    lengths, length_stride, new_lengths, new_length_stride, status, batch, slots, window,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Shorten the lengths; `slots` is the size of the shortest ring, 0 without caches.

    The status is 1 where the ring has already overwritten a position that the window of the new
    length needs.
    """
    b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = b < batch
    length = tl.load(lengths + b * length_stride, mask=inside, other=0).to(tl.int64)
    new_length = tl.load(new_lengths + b * new_length_stride, mask=inside, other=0).to(tl.int64)
    kept = truncated_length(length, new_length)
    # Where kept > 0, the length is positive too, so nothing overflows.
    lost = (slots > 0) & (kept > 0) & (tl.maximum(kept - window, 0) < length - slots)
    tl.store(status + b, lost.to(tl.int32), mask=inside)
    tl.store(lengths + b * length_stride, kept, mask=inside)


def ring_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, window: int, zero_fill: bool
) -> Tensor:
    """`reference.ring_truncate_` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    (new_lengths,) = read_first([new_lengths], [lengths])
    batch = lengths.shape[0]
    status = lengths.new_empty((batch,), dtype=torch.int32)
    if batch == 0:
        return status
    slots = min((t.shape[2] for t in caches), default=0)
    with launch.on_device_of(lengths):
        if zero_fill:
            zero_dropped(caches, lengths, new_lengths, RING=True)
        shorten_rings[(triton.cdiv(batch, LENGTHS),)](
            lengths, lengths.stride(0), new_lengths, new_lengths.stride(0), status, batch, slots,
            window, BLOCK=LENGTHS,
        )  # fmt: skip
    return status
