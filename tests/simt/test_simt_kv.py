"""The CUDA source of kv_append_ and kv_truncate_, run on the CPU by the SIMT emulator."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support import kv_cases, simt_kv
from support.kv_buffers import check, check_far_apart

pytestmark = pytest.mark.skipif(
    not simt_kv.available, reason="needs g++ and the sources of the CUDA kernels"
)

CASES = [*kv_cases.append_cases(), *kv_cases.truncate_cases()]


@pytest.fixture
def library(capfd):
    """The library; the test fails if the undefined-behaviour sanitizer reports something."""
    yield simt_kv.library()
    assert "runtime error" not in capfd.readouterr().err


@pytest.fixture(params=[False, True], ids=["first-to-last", "last-to-first"])
def order(request, library):
    """Runs a test with two orders of threads, since no thread may rely on an earlier one."""
    with library.order(reverse=request.param):
        yield


@pytest.fixture
def append(library):
    return library.op("kv_append_")


@pytest.fixture
def truncate(library):
    return library.op("kv_truncate_")


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}{case}")
def test_leaves_the_bytes_of_the_reference(library, case):
    check(library.op(case.op), case)


@pytest.mark.parametrize("seed", range(40))
def test_random_caches(library, seed):
    for case in kv_cases.random_append_and_truncate(seed):
        check(library.op(case.op), case)


def test_a_sequence_larger_than_the_grid(append, truncate):
    """The threads of a grid loop when a sequence has more vectors than the grid has threads."""
    half = torch.float16
    check(append, kv_cases.append("wide", [(2, 1100, 1060, 129)], [17], half))
    check(truncate, kv_cases.truncate("wide", [(1, 900, 65)], [900, 880], [0, 7], half))


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


def test_addresses_beyond_2_to_the_31_elements(append, truncate):
    check_far_apart(append, truncate)


@pytest.mark.parametrize(
    ("count", "launches"), [(0, 0), (1, 1), (64, 1), (65, 1), (256, 1), (257, 2)]
)
def test_one_launch_serves_up_to_256_caches(library, append, truncate, count, launches):
    caches = [torch.zeros(2, 1, 4, 3) for _ in range(count)]
    entries = [torch.ones(2, 1, 2, 3) for _ in range(count)]
    lengths = torch.tensor([2, 1])

    def launched(op, *args):
        before = library.launches()
        op(*args)
        return library.launches() - before

    assert launched(append, caches, entries, lengths) == launches
    assert launched(append, caches, [e[:, :, :0] for e in entries], lengths) == 0
    assert launched(append, [c[:0] for c in caches], [e[:0] for e in entries], lengths[:0]) == 0
    assert launched(truncate, caches, lengths, lengths - 1, True) == launches + 1
    assert launched(truncate, caches, lengths, lengths - 1, False) == 1
    assert launched(truncate, [c[:0] for c in caches], lengths[:0], lengths[:0], True) == 0


def test_the_sanitizer_reports_a_misaligned_load(capfd):
    """Negative control: a 16-byte load from an odd address."""
    library = simt_kv.library()
    if not library.sanitized:
        pytest.skip("this g++ has no undefined-behaviour sanitizer library")
    buffer = ctypes.create_string_buffer(64)
    library.misaligned_load(ctypes.addressof(buffer) + 1)
    assert "runtime error" in capfd.readouterr().err
