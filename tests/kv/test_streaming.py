"""Compaction of more than 8 MiB, which the CPU streams past its caches where rows allow it.

Rows that are no multiple of 256 bytes, such as heads of 96, 160 and 224 in 16 bits, are copied.
"""

import pytest
import torch
from support.providers import provider

STREAMED = 8 * 1024 * 1024  # bytes, from which on csrc/cpu/kv/compact.cpp streams


@pytest.mark.parametrize("size", [96, 160, 224, 128])
def test_moves_of_more_than_8_mib_leave_the_right_bytes(size):
    heads, slots = 32, 1500
    moved = STREAMED // (heads * size * 2) + 1
    g = torch.Generator().manual_seed(size)
    cache = torch.randint(-(2**15), 2**15, (1, heads, slots, size), generator=g).to(torch.int16)
    # Each node lies after its new slot, so that all tokens move.
    path = torch.randperm(slots - 2, generator=g)[: moved + 1].sort().values[None]
    path = path + 1
    assert path.shape[1] > moved
    want = cache.clone()
    want[:, :, : path.shape[1]] = cache[:, :, path[0]]
    provider("kv_compact_", "cpp")([cache], torch.tensor([0]), path)
    assert torch.equal(cache, want)
