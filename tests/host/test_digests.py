"""Digests of arrays: whatever changes an array changes its digest, and nothing else does."""

from itertools import combinations

import numpy as np
import pytest
import specdec_host as host

# Bits of float32, in three and a half blocks of 8 KiB.
WEIGHT = np.random.default_rng(0).normal(size=(37, 193)).astype(np.float32).view(np.uint32)
PAIRS = [(i, i + k) for k in (1, 2, 2048, 4096) for i in range(0, 3000, 9)]
ROWS = [*combinations(range(37), 2)]


def weights():
    """The weight, and with other bits, signs, or another order of numbers, rows or columns."""
    flat, numbers = WEIGHT.ravel(), np.arange(WEIGHT.size)
    yield WEIGHT
    yield from (flat ^ (numbers == i).astype(np.uint32) << i % 32 for i in numbers)
    yield from (flat ^ np.isin(numbers, pair).astype(np.uint32) << 31 for pair in PAIRS)
    for x, pairs in (flat, PAIRS), (WEIGHT, ROWS), (WEIGHT.T, ROWS):
        for i, j in pairs:
            x[[i, j]] = x[[j, i]]
            yield WEIGHT
            x[[i, j]] = x[[j, i]]
    for k in 2 ** np.arange(1, 12):  # the first block and the second one, too
        yield np.concatenate([flat[k : 2 * k], flat[:k], flat[2 * k :]])


def test_every_change_is_seen_and_sums_and_exclusive_ors_miss_some():
    found, sums, ors = [], set(), set()
    for x in weights():
        found += host.digests([x])
        sums.add(int(x.sum(dtype=np.uint64)))
        ors.add(int(np.bitwise_xor.reduce(x, axis=None)))
    assert len({*found}) == len(found) > 11_000
    assert max(len(sums), len(ors)) < len(found) - 1000


def test_bits_and_sizes_count_and_neither_threads_nor_addresses_do():
    data = np.random.default_rng(1).bytes(100_000)
    sizes = (0, 1, 7, 8, 9, 8191, 8192, 8193, 16_384, 70_001)
    want = host.digests([np.frombuffer(data[:n], np.uint8) for n in sizes])
    for threads in (1, 2, 3, 9, 100):
        for begin in (*range(9), 63):
            moved = np.frombuffer(bytes(begin) + data, np.uint8)[begin:]
            assert host.digests([moved[:n] for n in sizes], threads=threads) == want
    assert [host.digests([np.frombuffer(data[:n], np.uint8)])[0] for n in sizes] == want
    assert len({*host.digests([np.zeros(n, np.uint8) for n in sizes])}) == len(sizes)
    nans = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0, 1 << 31], np.uint32).view(np.float32)
    assert len({*host.digests([*nans[:, None]])}) == 5
    assert host.digests([]) == []


def test_arrays_with_gaps_are_refused():
    with pytest.raises(ValueError, match=r"arrays\[1\] must be contiguous, got strides \(4, 772"):
        host.digests([WEIGHT, WEIGHT.T])
    with pytest.raises(TypeError, match=r"arrays\[0\] must be an array, got 1.5"):
        host.digests([1.5])
