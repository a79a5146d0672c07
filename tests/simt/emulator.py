"""The CUDA kernels of `sample`, the verifiers and `ngram_propose` as ops on CPU tensors.

tests/simt compiles the CUDA source with g++ and runs its threads as fibers, one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch
from simt.sanitize import KERNELS, ROOT
from support.shared_build import built_once

from specdec_kernels.arguments.rules import SCHEDULES

OPS = "tests/simt/ops.cpp"
TREES = "csrc/cuda/tree/verify_tree.cu"
# What g++ compiles as one, which reads most headers once. Trees name some things as the others do.
UNITS = (tuple(k for k in KERNELS if k != TREES), (TREES,), (OPS,))
TORCH = Path(torch.__file__).parent
COMPILE = (
    *("g++", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    *("-I", str(ROOT / "tests/simt"), "-I", str(ROOT / "csrc/include"), "-I", str(ROOT / "csrc")),
    *("-isystem", str(TORCH / "include")),
)  # fmt: skip

# So few multiprocessors that small cases fill them.
MULTIPROCESSORS = 4
# The orders in which threads can run: whether from the last to the first, the seed of a random
# order or 0, and how many block groups take turns; the others run one group after the other.
ORDERS = {
    "forward": (False, 0, 1),
    "reverse": (True, 0, 1),
    "seed-1": (False, 1, 1),
    "seed-2": (False, 2, 1),
    "interleaved-1": (False, 3, 8),
    "interleaved-2": (False, 4, 8),
}
ALL_ONES = 2**64 - 1
CHAIN_KERNELS = ("general", "logits", "probs")  # in the order of cuda::Variant
# Schedules and group sizes; group size 0 lets the plan choose.
SHARES = {
    "lazy-1": ("lazy", 1),
    "lazy-7": ("lazy", 7),
    "lazy-8": ("lazy", 8),
    "parallel-1": ("parallel", 1),
    "parallel-8": ("parallel", 8),
    "auto": ("auto", 0),
}

# Misaligned words and signed overflow, which a CPU forgives and a GPU does not.
SANITIZE = ("-fsanitize=undefined", "-fno-sanitize=vptr")

available = bool(shutil.which("g++")) and all((ROOT / s).exists() for s in (*KERNELS, OPS))


class Plan(NamedTuple):
    """How a launch splits its work: `CudaPlan` in csrc/include/specdec/cuda_plan.h."""

    workspace_bytes: int
    groups: int
    group_size: int
    splits: int
    parallel: int


class Library:
    """The built library: its ops by name, and switches for the tests."""

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(path)
        self._native = ctypes.CDLL(str(path))
        self._native.simt_order.argtypes = [ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint]
        self._native.simt_workspace.argtypes = [ctypes.c_uint64]
        self._native.simt_next_launch.restype = ctypes.c_uint64
        self._native.simt_last_written.restype = ctypes.c_int64
        self._native.simt_warp_mass.restype = ctypes.c_double
        self._native.simt_warp_mass.argtypes = [ctypes.c_float, ctypes.c_void_p]
        self._native.simt_choose.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p)
        ]
        self._native.simt_measure.restype = ctypes.c_double
        self._native.simt_measure.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p)
        ]

    def op(self, name: str):
        return getattr(torch.ops.specdec_kernels_simt, name).default

    @contextlib.contextmanager
    def driver(self, version: int = 13_000):
        """Launches under a driver for this version of CUDA; the kernels are built with 13.0."""
        self._native.simt_driver(version)
        try:
            yield
        finally:
            self._native.simt_driver(13_000)

    @contextlib.contextmanager
    def partition(self, largest_cluster: int):
        """Devices that run no larger clusters; each is asked at its first call."""
        self._native.simt_partition(largest_cluster)
        try:
            yield
        finally:
            self._native.simt_partition(16)

    def last_error(self, pending: int = 0) -> int:
        """The last error of the runtime, which `pending` then is."""
        return self._native.simt_last_error(pending)

    @contextlib.contextmanager
    def sharing(self, schedule="auto", group=0, *, order="forward", capability=9, fill=ALL_ONES):
        """Launches with this schedule and order of threads, in a workspace filled with `fill`."""
        share = torch.ops.specdec_kernels_simt.set_cuda_schedule.default
        share(SCHEDULES.index(schedule), group)
        self._native.simt_order(*ORDERS[order])
        self._native.simt_device(MULTIPROCESSORS, capability)
        self._native.simt_workspace(fill)
        try:
            yield
        finally:
            share(SCHEDULES.index("auto"), 0)
            self._native.simt_order(*ORDERS["forward"])
            self._native.simt_workspace(ALL_ONES)

    def plan(self, device, sequences, rows, warp_tiles) -> Plan:
        """`device`: multiprocessors, then how many groups of 1 to 8 blocks run at once."""
        out = (ctypes.c_int64 * 5)()
        sizes = [ctypes.c_int64(n) for n in (sequences, rows, warp_tiles)]
        # The last group reads rows again; it does not test all drafts, nor read draft rows.
        flags = [ctypes.c_bool(b) for b in (True, False, False)]
        self._native.simt_plan((ctypes.c_int32 * 9)(*device), *sizes, *flags, out)
        return Plan(*out)

    def last_chain_kernel(self) -> str:
        """The kernel that served the last call of verify_chain."""
        return CHAIN_KERNELS[self._native.simt_last_variant()]

    def last_written(self) -> int:
        """How many bytes of the workspace the last launch wrote, with another value than before."""
        return self._native.simt_last_written()

    def first_words(self, n: int) -> list[int]:
        """The first words of the workspace after the last launch."""
        out = (ctypes.c_uint64 * n)()
        self._native.simt_first_words(ctypes.c_int64(n), out)
        return list(out)

    def next_launch(self) -> int:
        return self._native.simt_next_launch()

    def choose(
        self, units: list[int], u: float, maxima: list[float] | None = None
    ) -> tuple[int, int]:
        """The warp tile that a draw with `u` finds, and the mass in it before the point drawn.

        maxima: the largest logit of each tile, at temperature 1; by default all are 0.
        """
        n, out = len(units), (ctypes.c_int64 * 2)()
        tops = (ctypes.c_float * n)(*(maxima or [0.0] * n))
        assert self._native.simt_choose((ctypes.c_int64 * n)(*units), tops, n, u, out) == 0
        return out[0], out[1]

    def measure(self, logits: torch.Tensor, temperature: float) -> tuple[list[int], float]:
        """The masses of the warp tiles of a float32 row, and log sum exp((l - max) / T)."""
        masses = (ctypes.c_int64 * -(-len(logits) // 512))()
        row = logits.contiguous()
        log_sum = self._native.simt_measure(row.data_ptr(), len(row), temperature, masses)
        return list(masses), log_sum

    def arrive(self, ticket: int, seen: int, launch: int, count: int) -> tuple[bool, int]:
        """Whether a group that once read `seen` is the last to arrive; and the ticket after it."""
        word = ctypes.c_uint64(ticket)
        words = [ctypes.c_uint64(n) for n in (seen, launch)]
        last = self._native.simt_arrive(ctypes.byref(word), *words, ctypes.c_uint(count))
        return bool(last), word.value

    def largest(self, maxima: list[float]) -> float:
        """The maximum of a row whose warp tiles have these."""
        self._native.simt_largest.restype = ctypes.c_float
        return self._native.simt_largest((ctypes.c_float * len(maxima))(*maxima), len(maxima))

    def warp_mass(self, weight: float) -> float:
        """The mass of a warp tile whose entries all have this weight, in units of the weight 1."""
        out = ctypes.c_int64()
        return self._native.simt_warp_mass(weight, ctypes.byref(out)) ** -1 * out.value

    def last_plan(self) -> Plan:
        """The plan of the last launch."""
        return Plan(*self.op("last_cuda_schedule")())


def compile_sanitized(out: Path, *command: str | Path) -> None:
    """Compile a library with the sanitizer, or without it if g++ has not got its library."""
    command = (*command, "-shared", "-o", out)
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run((*command, *SANITIZE))
    if done.returncode != 0 and "ubsan" in done.stderr:
        done = run(command)
    assert done.returncode == 0, done.stderr


def build(out: Path) -> None:
    """Compiles the sources side by side; 17 seconds of a processor."""
    objects = [out.parent / f"{number}.o" for number in range(len(UNITS))]
    commands = []
    for (*first, last), o in zip(UNITS, objects, strict=True):
        included = [word for source in first for word in ("-include", ROOT / source)]
        optimise = "-O1" if last == OPS else "-O2"
        commands.append((*COMPILE, optimise, "-c", *included, "-x", "c++", ROOT / last, "-o", o))
    running = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    errors = [process.communicate()[1] for process in running]
    assert not any(process.returncode for process in running), "".join(errors)
    link = ["g++", "-shared", "-o", out, *objects, TORCH / "lib/libtorch_cpu.so"]
    done = subprocess.run(link, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def library() -> Library:
    """Loaded once in each process, because the ops can be registered only once."""
    return Library(built_once("libspecdec_simt.so", build))
