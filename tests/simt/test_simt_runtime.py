"""Tests the SIMT emulator itself: kernels that meet at barriers, and faults it has to report."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
from support.shared_build import built_once
from support.simt_kv import compile_sanitized
from support.simt_ops import ORDERS, ROOT

COMPILE = ("g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "tests/simt")
INVALID_VALUE, INVALID_CONFIGURATION, LAUNCH_FAILURE = 1, 9, 719
INVALID_CLUSTER = 912

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
]


def build(out):
    compile_sanitized(out, *COMPILE, "-fPIC", ROOT / "tests/simt/runtime.cpp")


@pytest.fixture(scope="session")
def built():
    library = ctypes.CDLL(str(built_once("libruntime_simt.so", build)))
    library.error_string.restype = ctypes.c_char_p
    library.set_order.argtypes = [ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint]
    library.active_blocks.argtypes = [ctypes.c_int, ctypes.c_size_t]
    library.run_empty.argtypes = [ctypes.c_uint] * 3 + [ctypes.c_size_t]
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


def integers(n, low=-1000, high=1000):
    return np.random.default_rng(n).integers(low, high, n).astype(np.int32)


def block_sums(library, x, grid, barrier=True):
    out = np.zeros_like(x)
    assert library.run_sum(pointer(x), pointer(out), grid, len(x) // grid, barrier) == 0
    return out


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(("grid", "block"), [(1, 32), (3, 256), (2, 1024)])
def test_block_sum(library, grid, block):
    x = integers(grid * block)
    want = x.reshape(grid, block).sum(1).repeat(block)
    np.testing.assert_array_equal(block_sums(library, x, grid), want)


def test_without_a_barrier_results_depend_on_the_order(library):
    x = integers(256)
    results = []
    for order in ORDERS.values():
        library.set_order(*order)
        results.append(block_sums(library, x, 1, barrier=False))
    want = np.full_like(x, x.sum())
    assert not any(np.array_equal(r, want) for r in results)
    for i, a in enumerate(results):
        assert not any(np.array_equal(a, b) for b in results[:i])


def test_a_seed_gives_the_same_order_again(library):
    x = integers(512)
    library.set_order(False, 7, 1)
    first = block_sums(library, x, 1, barrier=False)
    np.testing.assert_array_equal(block_sums(library, x, 1, barrier=False), first)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_cluster_sum(library, cluster):
    x = integers(16 * 64)
    out = np.zeros(16, np.int32)
    assert library.run_cluster(pointer(x), pointer(out), 16, 64, cluster, True) == 0
    sums = x.reshape(16 // cluster, -1).sum(1).repeat(cluster)
    np.testing.assert_array_equal(out, sums * 16 + np.arange(16) % cluster)


def last_block_finishes(library, one_step=True):
    """Whether the last of 100 blocks adds up the sums of all, in each of two launches."""
    x = integers(100 * 128)
    sums, ticket, out = np.zeros(100, np.int32), np.zeros(1, np.uint32), np.zeros(1, np.int32)
    good = True
    for _ in range(2):  # the ticket is zero again afterwards
        arguments = pointer(x), pointer(sums), pointer(ticket), pointer(out)
        assert library.run_ticket(*arguments, 100, one_step) == 0
        good &= out[0] == x.sum() and ticket[0] == 0
        sums[:] = out[:] = 0
    return good


@pytest.mark.usefixtures("order")
def test_the_last_block_finishes(library):
    assert last_block_finishes(library)


@pytest.mark.parametrize("order", [(False, 0, 3), (True, 0, 3), (False, 5, 3)])
def test_the_last_of_the_blocks_that_take_turns_may_be_fewer(library, order):
    library.set_order(*order)
    assert last_block_finishes(library)


def test_interleaved_blocks_show_that_a_ticket_is_not_taken_in_one_step(library):
    """Blocks that run one after the other do not."""
    right = {}
    for name, order in ORDERS.items():
        library.set_order(*order)
        right[name] = last_block_finishes(library, one_step=False)
    assert right == {name: not name.startswith("interleaved") for name in ORDERS}


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("cluster", [1, 3])
def test_shared_memory_starts_poisoned(library, cluster):
    out = np.zeros(6 * 64, np.uint32)
    assert library.run_poison(pointer(out), 6, cluster) == 0
    assert (out == 0xFFFFFFFF).all()


@pytest.mark.usefixtures("order")
def test_lanes_see_each_other_after_syncwarp(library):
    out = np.zeros(32, np.int32)
    assert library.run_neighbour(pointer(out), True) == 0
    np.testing.assert_array_equal(out, np.arange(32) ^ 1)
    assert library.run_neighbour(pointer(out), False) == 0
    assert (out == -1).sum() == 16  # the first lane of each pair reads poison


@pytest.mark.usefixtures("order")
def test_lanes(library):
    x = np.random.default_rng(0).integers(0, 1 << 20, 32).astype(np.uint32)
    out = np.zeros((17, 32), np.uint64)
    assert library.run_lanes(pointer(x), pointer(out)) == 0
    lane = np.arange(32)
    wide, swapped = x.astype(np.uint64), x[lane ^ 1].astype(np.uint64)
    halves = x.reshape(2, 16)

    def of_halves(values):
        return np.array(values, np.uint64).repeat(16)

    def bits(flags):
        return sum(1 << int(i) for i in np.flatnonzero(flags))

    want = [
        *(wide[[5] * 32], wide[(35 - lane) % 32], wide[lane // 8 * 8 + 1]),
        *(wide[np.where(lane < 3, lane, lane - 3)], wide[np.where(lane & 8, lane ^ 9, lane)]),
        *(wide[lane ^ 9], swapped // 2, swapped // 4, swapped * np.uint64(0x100000001), swapped),
        of_halves([bits(x & 1) & 0xFFFF, bits(x & 1) & 0xFFFF0000]),
        of_halves([(half == x[0]).any() for half in halves]),
        of_halves([1, 0]),
        *(of_halves(halves.sum(1)), of_halves(halves.max(1))),
        np.where(lane % 2, 0xAAAAAA00, 0x55555500),
        np.full(32, 2),
    ]
    for row, (got, expected) in enumerate(zip(out, want, strict=True)):
        np.testing.assert_array_equal(got, expected, err_msg=f"row {row}")


def fails(library, fault, threads=64):
    """The emulator's message about a launch with this fault of runtime.cpp."""
    status = library.run_fault(fault, threads)
    assert status == LAUNCH_FAILURE
    assert library.last_error() == LAUNCH_FAILURE
    return library.error_string(status).decode()


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
        pytest.param(11, ["livelock"], id="spin"),
        pytest.param(14, ["this_cluster().sync", "return"], id="half-of-the-cluster"),
    ],
)
def test_threads_that_do_not_meet_fail_the_launch(library, fault, words):
    message = fails(library, fault)
    assert all(word in message for word in words), message
    assert library.run_fault(0, 64) == 0  # the next launch succeeds


def test_a_deadlock_names_its_threads(library):
    assert fails(library, 4) == (
        "deadlock: 66 waiting at __syncthreads, first thread (7,0,0) of block (0,0,0); "
        "62 waiting at __syncwarp, first thread (0,0,0) of block (0,0,0)"
    )


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(9, "wrote at byte 64 of its shared memory, which has 64 bytes", id="overflow"),
        pytest.param(10, "wrote before its shared memory, which has 64 bytes", id="underflow"),
    ],
)
def test_writes_outside_shared_memory_fail_the_launch(library, fault, words):
    assert words in fails(library, fault)


def test_use_of_shared_memory_of_a_block_that_has_returned_fails(library):
    assert "which has returned" in fails(library, 12)
    assert "written after the block had returned" in fails(library, 13)


def test_a_cluster_without_a_last_barrier_fails(library):
    x, out = integers(2 * 64), np.zeros(2, np.int32)
    status = library.run_cluster(pointer(x), pointer(out), 2, 64, 2, False)
    assert status == LAUNCH_FAILURE
    assert b"which has returned" in library.error_string(status)


def test_limits_of_a_launch(library):
    def empty(grid=2, block=32, cluster=1, shared=0):
        status = library.run_empty(grid, block, cluster, shared)
        assert library.last_error() == status
        return status

    assert empty() == 0
    assert empty(grid=0) == empty(block=0) == empty(block=1025) == INVALID_CONFIGURATION
    assert empty(shared=49153) == INVALID_VALUE
    assert empty(cluster=3) == empty(cluster=16, grid=16) == INVALID_CLUSTER
    assert library.allow(True, 232449) == INVALID_VALUE
    assert library.allow(True, 232448) == 0
    library.last_error()
    assert empty(shared=232448, cluster=16, grid=16, block=1024) == 0
    library.set_device(1, 8)
    assert empty(cluster=2) == INVALID_CLUSTER
    library.set_device(4, 9)


def test_device_attributes(library):
    major, minor, optin, multiprocessors = 75, 76, 97, 16
    library.set_device(132, 9)
    ids = (major, minor, optin, multiprocessors)
    assert [library.attribute(i) for i in ids] == [9, 0, 232448, 132]
    assert library.active_blocks(1024, 0) == 2
    assert library.active_blocks(32, 0) == 32
    assert library.active_blocks(128, 50_000) == 4
    assert library.active_clusters(1024, 8) == 33
    library.set_device(4, 9)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "__global__ void f() { __shared__ float x[32]; }",
            "static shared memory is not emulated",
        ),
        ("__global__ void __cluster_dims__(2) f() {}", "give the cluster as a launch attribute"),
    ],
    ids=["static-shared", "cluster-dims"],
)
def test_unsupported_features_do_not_compile(tmp_path, line, words):
    source = tmp_path / "kernel.cpp"
    source.write_text(f"#include <cuda_runtime.h>\n{line}\n")
    command = [*COMPILE, "-fsyntax-only", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert words in done.stderr
