"""The body of csrc/cuda/kv.cu on the CPU: g++ compiles it against the shim in tests/simt."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import kv_cases
import pytest
import torch
from kv_cases import KvCase, check_append, check_truncate

ROOT = Path(__file__).parent.parent
# Misaligned lanes and signed overflow, which a CPU forgives and a GPU does not.
SANITIZE = ["-fsanitize=undefined", "-fno-sanitize=vptr"]

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") and (ROOT / "csrc/cuda/kv.cu").exists()),
    reason="needs g++ and the sources of the CUDA kernels",
)


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("sequence", "head", "slot")]


class KvTensor(ctypes.Structure):
    """As in csrc/include/specdec/kv.h."""

    _fields_ = [
        ("cache", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("cache_stride", Strides),
        ("entry_stride", Strides),
        *((name, ctypes.c_int64) for name in ("heads", "slots", "count", "row_bytes")),
    ]


def _compile(folder, flags):
    out = folder / "libkv_simt.so"
    command = [
        *("g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"),
        *("-I", ROOT / "tests/simt", "-I", ROOT / "csrc/include", *flags),
        *(ROOT / "tests/simt/kv.cpp", "-o", out),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False), out


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The library, and whether the sanitizer is in it."""
    folder = tmp_path_factory.mktemp("simt")
    done, out = _compile(folder, SANITIZE)
    sanitized = done.returncode == 0
    if not sanitized and "ubsan" in done.stderr:  # g++ without its sanitizer library
        done, out = _compile(folder, [])
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(out))
    library.simt_launches.restype = ctypes.c_int64
    library.simt_sizeof_tensor.restype = ctypes.c_int64
    library.simt_misaligned_load.argtypes = [ctypes.c_void_p]
    assert library.simt_sizeof_tensor() == ctypes.sizeof(KvTensor)
    return library, sanitized


@pytest.fixture
def library(built, capfd):
    """The library; the test fails when the sanitizer spoke."""
    yield built[0]
    assert "runtime error" not in capfd.readouterr().err


@pytest.fixture(params=[False, True], ids=["first-to-last", "last-to-first"])
def order(request, library):
    """No thread may rely on one before it."""
    library.simt_reverse(request.param)
    yield
    library.simt_reverse(False)


def _vector(t):
    return ctypes.c_void_p(t.data_ptr()), ctypes.c_int64(t.stride(0))


def _strides(t):
    return Strides(*(n * t.element_size() for n in t.stride()[:3]))


def _tensors(caches, entries):
    rows = []
    for cache, entry in zip(caches, entries, strict=True):
        _, heads, slots, d = cache.shape
        given = (0, Strides(), 0)
        if entry is not None:
            given = (entry.data_ptr(), _strides(entry), entry.shape[2])
        rows.append(
            KvTensor(
                *(cache.data_ptr(), given[0], _strides(cache), given[1]),
                *(heads, slots, given[2], d * cache.element_size()),
            )
        )
    return (KvTensor * len(rows))(*rows), ctypes.c_int64(len(rows))


@pytest.fixture
def append(library):
    def op(caches, entries, positions):
        table, count = _tensors(caches, entries)
        batch = ctypes.c_int64(len(positions))
        assert library.simt_kv_append(table, count, batch, *_vector(positions)) == 0

    return op


@pytest.fixture
def truncate(library):
    def op(caches, lengths, new_lengths, zero_fill):
        table, count = _tensors(caches, [None] * len(caches))
        batch = ctypes.c_int64(len(lengths))
        vectors = (*_vector(lengths), *_vector(new_lengths))
        status = library.simt_kv_truncate(table, count, batch, *vectors, ctypes.c_bool(zero_fill))
        assert status == 0

    return op


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
        before = library.simt_launches()
        op(*args)
        return library.simt_launches() - before

    assert launched(append, caches, entries, lengths) == launches
    assert launched(append, caches, [e[:, :, :0] for e in entries], lengths) == 0
    assert launched(append, [c[:0] for c in caches], [e[:0] for e in entries], lengths[:0]) == 0
    assert launched(truncate, caches, lengths, lengths - 1, True) == launches + 1
    assert launched(truncate, caches, lengths, lengths - 1, False) == 1
    assert launched(truncate, caches, lengths[:0], lengths[:0], True) == 0


def test_the_sanitizer_is_awake(built, capfd):
    """Negative control: a misaligned 16-byte lane is reported."""
    library, sanitized = built
    if not sanitized:
        pytest.skip("this g++ has no undefined-behaviour sanitizer library")
    buffer = ctypes.create_string_buffer(64)
    library.simt_misaligned_load(ctypes.addressof(buffer) + 1)
    assert "runtime error" in capfd.readouterr().err
