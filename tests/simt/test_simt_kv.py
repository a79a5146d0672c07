"""Launches of the CUDA source of the cache ops, run on the CPU by the SIMT emulator.

tests/kv compares it with the reference.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from kv import edge_cases
from proofs import check
from simt import kv_emulator

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(
        not kv_emulator.available, reason="needs g++ and the sources of the CUDA kernels"
    ),
]


@pytest.fixture
def library(capfd):
    """The library; the test fails if the undefined-behaviour sanitizer reports something."""
    yield kv_emulator.library()
    assert "runtime error" not in capfd.readouterr().err


@pytest.fixture
def append(library):
    return library.op("kv_append_")


@pytest.fixture
def truncate(library):
    return library.op("kv_truncate_")


def test_the_last_thread_may_run_first(library):
    """No thread may rely on an earlier one."""
    cases = [
        *(*edge_cases.append_cases()[::4], *edge_cases.truncate_cases()[::4]),
        *(edge_cases.every_path(), *edge_cases.realign_cases()[-4:]),
        *(edge_cases.random_case("paged_compact_", seed) for seed in range(20)),
    ]
    with library.order(reverse=True):
        for case in cases:
            check(library.op(case.op), case)


def test_a_sequence_larger_than_the_grid(append, truncate):
    """The threads of a grid loop when a sequence has more vectors than the grid has threads."""
    half = torch.float16
    check(append, edge_cases.append("wide", [(2, 1100, 1060, 129)], [17], half))
    check(truncate, edge_cases.truncate("wide", [(1, 900, 65)], [900, 880], [0, 7], half))


@pytest.mark.full
def test_more_sequences_than_the_grid_holds(append, truncate):
    """The z dimension of a grid ends at 65535."""
    n = 65_540
    cache = torch.zeros(n, 1, 2, 1, dtype=torch.int8)
    new = torch.ones(n, 1, 1, 1, dtype=torch.int8)
    positions = torch.arange(n) % 2
    append([cache], [new], positions)
    assert cache.view(n, 2).argmax(1).equal(positions)
    assert int(cache.sum()) == n
    lengths = torch.full((n,), 2)
    truncate([cache], lengths, positions + 1, True)
    assert lengths.equal(positions + 1)
    assert int(cache.sum()) == n


@pytest.mark.parametrize(("count", "launches"), [(0, 0), (1, 1), (256, 1), (257, 2)])
def test_one_launch_serves_up_to_256_caches(library, count, launches):
    caches = [torch.zeros(2, 1, 4, 3) for _ in range(count)]
    entries = [torch.ones(2, 1, 2, 3) for _ in range(count)]
    lengths, path = torch.tensor([2, 1]), torch.tensor([[0, 2], [1, 2]])
    for name, most, *args in (
        ("kv_append_", launches, caches, entries, lengths),
        ("kv_append_", 0, caches, [e[:, :, :0] for e in entries], lengths),
        ("kv_truncate_", launches + 1, caches, lengths, lengths - 1, True),
        ("kv_truncate_", 1, caches, lengths, lengths - 1, False),
        ("kv_compact_", launches, caches, lengths, path),
        ("kv_realign_", launches, caches, lengths, lengths, lengths, True),
    ):
        before = library.launches()
        library.op(name)(*args)
        assert library.launches() - before == most, name


def test_the_sanitizer_reports_a_misaligned_load(capfd):
    """Negative control: a 16-byte load from an odd address."""
    library = kv_emulator.library()
    if not library.sanitized:
        pytest.skip("this g++ has no undefined-behaviour sanitizer library")
    buffer = ctypes.create_string_buffer(64)
    library.misaligned_load(ctypes.addressof(buffer) + 1)
    assert "runtime error" in capfd.readouterr().err
