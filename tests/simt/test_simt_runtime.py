"""Tests the SIMT emulator itself: kernels that meet at barriers, and faults it has to report."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
from simt.emulator import ORDERS, ROOT, compile_sanitized
from support.shared_build import built_once

COMPILE = ("g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "tests/simt")
LAUNCH_FAILURE = 719

pytestmark = [pytest.mark.build, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")]


def build(out):
    compile_sanitized(out, *COMPILE, "-fPIC", ROOT / "tests/simt/runtime.cpp")


@pytest.fixture(scope="session")
def built():
    library = ctypes.CDLL(str(built_once("libruntime_simt.so", build)))
    library.error_string.restype = ctypes.c_char_p
    library.set_order.argtypes = [ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint]
    return library


@pytest.fixture
def library(built, capfd):
    yield built
    built.set_order(*ORDERS["forward"])
    built.last_error()
    assert "runtime error" not in capfd.readouterr().err


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def order(request, library):
    library.set_order(*request.param)
    return request.param


def pointer(a):
    return a.ctypes.data_as(ctypes.c_void_p)


def test_without_a_barrier_results_depend_on_the_order(library):
    x = np.random.default_rng(256).integers(-1000, 1000, 256).astype(np.int32)
    results = {True: [], False: []}
    for order in ORDERS.values():
        library.set_order(*order)
        for barrier, found in results.items():
            out = np.zeros_like(x)
            assert library.run_sum(pointer(x), pointer(out), barrier) == 0
            found.append(tuple(out))
    right = (x.sum(),) * 256
    assert set(results[True]) == {right}
    assert right not in results[False]
    assert len(set(results[False])) == len(ORDERS)


def all_are_counted(library, one_step):
    count = np.zeros(1, np.uint32)
    assert library.run_count(pointer(count), 100, one_step) == 0
    return count[0] == 100


def test_interleaved_blocks_show_that_a_count_is_not_taken_in_one_step(library):
    """Blocks that run one after the other do not."""
    for name, order in ORDERS.items():
        library.set_order(*order)
        assert all_are_counted(library, one_step=True)
        assert all_are_counted(library, one_step=False) != name.startswith("interleaved")


@pytest.mark.usefixtures("order")
def test_shared_memory_starts_poisoned(library):
    out = np.zeros(6 * 64, np.uint32)
    assert library.run_poison(pointer(out), 6) == 0
    assert (out == 0xFFFFFFFF).all()


@pytest.mark.usefixtures("order")
def test_lanes_see_each_other_after_syncwarp(library):
    out = np.zeros(32, np.int32)
    assert library.run_neighbour(pointer(out), True) == 0
    np.testing.assert_array_equal(out, np.arange(32) ^ 1)
    assert library.run_neighbour(pointer(out), False) == 0
    assert (out == -1).sum() == 16  # the first lane of each pair reads poison


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(1, ["deadlock", "at __syncthreads", "at __shfl_sync"], id="divergent-barrier"),
        pytest.param(2, ["return", "__syncthreads"], id="return-before-barrier"),
        pytest.param(3, ["__syncthreads", "__syncthreads_or"], id="mixed-barriers"),
        pytest.param(4, ["deadlock", "__syncthreads", "__syncwarp"], id="barrier-against-warp"),
        pytest.param(5, ["__shfl_sync", "mask"], id="lanes-outside-the-mask"),
        pytest.param(6, ["reads lane 7", "__shfl_xor_sync"], id="read-of-returned-lane"),
        pytest.param(7, ["__any_sync", "__ballot_sync"], id="mixed-collectives"),
        pytest.param(8, ["__syncwarp", "mask"], id="mask-without-caller"),
        pytest.param(9, ["wrote at byte 64 of its shared memory, which has 64"], id="overflow"),
        pytest.param(10, ["wrote before its shared memory, which has 64 bytes"], id="underflow"),
        pytest.param(11, ["livelock"], id="spin"),
    ],
)
def test_a_fault_of_the_threads_fails_the_launch_and_no_later_one(library, fault, words):
    status = library.run_fault(fault, 64)
    assert status == library.last_error() == LAUNCH_FAILURE
    message = library.error_string(status).decode()
    assert all(word in message for word in words), message
    assert library.run_fault(0, 64) == 0
