"""`ngram_propose` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch

BLOCK = 1024  # ends of matches, or tokens of a draft, of one step
OPTIONS = {"num_warps": 8}


@triton.jit
def match_sizes(text, stride, last, end, max_ngram):
    """How many tokens up to each end equal those up to `last`, at most `max_ngram`."""
    size = tl.zeros_like(end)
    most = tl.minimum(end + 1, max_ngram)
    going = end < last
    n = last * 0  # of the type that n += 1 keeps, as a loop in Triton requires
    while tl.max(going.to(tl.int32), 0) > 0:
        token = tl.load(text + (end - n) * stride, mask=going, other=0)
        going = going & (token == tl.load(text + (last - n) * stride))
        n += 1
        size += going.to(tl.int64)
        going = going & (most > n)
    return size


@launch.kernel("history", "stride_l")
def copy_matches(
    history, stride_b, stride_l, lengths, tokens, counts, columns, gamma, max_ngram, min_ngram,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B,): each program finds the match of one sequence and copies what followed it."""
    b = tl.program_id(0).to(tl.int64)
    history += b * stride_b
    length = tl.load(lengths + b).to(tl.int64)
    length = tl.where((length >= 0) & (length <= columns), length, 0)
    # The longer of two matches has the larger key; of equally long ones, the later.
    best = tl.zeros([BLOCK], tl.int64)
    for first in range(0, length - 1, BLOCK):
        end = first + tl.arange(0, BLOCK).to(tl.int64)
        size = match_sizes(history, stride_l, length - 1, end, max_ngram)
        best = tl.maximum(best, tl.where(size > 0, (size << 32) | end, 0))
    key = tl.max(best, 0)
    found = (key >> 32) >= min_ngram
    start = (key & 0xFFFFFFFF) + 1
    period = tl.where(found, length - start, 1)
    count = tl.where(found, gamma, 0)
    # Counted in blocks, because the 32 bits of `gamma` do not hold the block after the last.
    for block in range(0, (gamma - 1) // BLOCK + 1):
        i = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        at = history + (start + i % period) * stride_l
        token = tl.load(at, mask=i < count, other=-1)
        tl.store(tokens + b * gamma + i, token, mask=i < gamma)
    tl.store(counts + b, count)


def ngram_propose(
    history: Tensor, lengths: Tensor, gamma: int, max_ngram: int, min_ngram: int
) -> tuple[Tensor, Tensor]:
    """`reference.ngram_propose` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    b, columns = history.shape
    tokens = history.new_empty((b, gamma))
    counts = history.new_empty((b,), dtype=torch.int32)
    (lengths,) = launch.packed(lengths)
    if b:
        with launch.on_device_of(history):
            copy_matches[(b,)](
                history, history.stride(0), history.stride(1), lengths, tokens, counts, columns,
                gamma, max_ngram, min_ngram, BLOCK=BLOCK, **OPTIONS,
            )  # fmt: skip
    return tokens, counts
