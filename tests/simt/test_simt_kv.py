"""The body of csrc/cuda/kv.cu on the CPU, through the shim in tests/simt."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support import kv_cases, simt_kv
from support.kv_cases import KvCase, check_append, check_truncate

pytestmark = pytest.mark.skipif(
    not simt_kv.available, reason="needs g++ and the sources of the CUDA kernels"
)


@pytest.fixture
def library(capfd):
    """The library; the test fails when the sanitizer spoke."""
    yield simt_kv.library()
    assert "runtime error" not in capfd.readouterr().err


@pytest.fixture(params=[False, True], ids=["first-to-last", "last-to-first"])
def order(request, library):
    """No thread may rely on one before it."""
    with library.order(reverse=request.param):
        yield


@pytest.fixture
def append(library):
    return library.op("kv_append_")


@pytest.fixture
def truncate(library):
    return library.op("kv_truncate_")


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("case", kv_cases.append_cases(), ids=str)
def test_append(append, case):
    check_append(append, case)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("zero_fill", [False, True], ids=["keep", "fill"])
@pytest.mark.parametrize("case", kv_cases.truncate_cases(), ids=str)
def test_truncate(truncate, case, zero_fill):
    check_truncate(truncate, case, zero_fill)


@pytest.mark.parametrize("seed", range(40))
def test_random(append, truncate, seed):
    added, cut = kv_cases.random_case(seed)
    check_append(append, added)
    check_truncate(truncate, cut, zero_fill=True)


def test_grid_strides(append, truncate):
    """More lanes a sequence than the grid has threads."""
    check_append(append, KvCase("wide", 1, [(2, 1100, 1060, 129)], [[17]], torch.float16))
    cut = KvCase("wide-cut", 2, [(1, 900, 0, 65)], [[900, 880], [0, 7]], torch.float16)
    check_truncate(truncate, cut, zero_fill=True)


def test_more_sequences_than_the_grid_holds(append, truncate):
    """Grid z ends at 65535."""
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


def test_more_than_2_to_the_31_elements_apart(append, truncate):
    kv_cases.check_far_apart(append, truncate)


@pytest.mark.parametrize(
    ("count", "launches"), [(0, 0), (1, 1), (64, 1), (65, 1), (256, 1), (257, 2)]
)
def test_launches(library, append, truncate, count, launches):
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


def test_the_sanitizer_is_awake(capfd):
    """Negative control: a misaligned 16-byte lane is reported."""
    library = simt_kv.library()
    if not library.sanitized:
        pytest.skip("this g++ has no undefined-behaviour sanitizer library")
    buffer = ctypes.create_string_buffer(64)
    library.misaligned_load(ctypes.addressof(buffer) + 1)
    assert "runtime error" in capfd.readouterr().err
