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

import torch
from simt.sanitize import KERNELS, ROOT
from support.shared_build import built_once

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
# order or 0, and how many blocks take turns; the others run one block after the other.
ORDERS = {
    "forward": (False, 0, 1), "reverse": (True, 0, 1), "seed-1": (False, 1, 1),
    "seed-2": (False, 2, 1), "interleaved-1": (False, 3, 8), "interleaved-2": (False, 4, 8),
}  # fmt: skip
ALL_ONES = 2**64 - 1
# Misaligned words and signed overflow, which a CPU forgives and a GPU does not.
SANITIZE = ("-fsanitize=undefined", "-fno-sanitize=vptr")

available = bool(shutil.which("g++")) and all((ROOT / s).exists() for s in (*KERNELS, OPS))


class Library:
    """The built library: its ops by name, and switches for the tests."""

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(path)
        self._native = ctypes.CDLL(str(path))
        self._native.simt_order.argtypes = [ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint]
        self._native.simt_workspace.argtypes = [ctypes.c_uint64]
        self._native.simt_own_workspace.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._native.simt_next_launch.restype = ctypes.c_uint64
        self._native.simt_last_written.restype = ctypes.c_int64
        self._native.simt_last_bytes.restype = ctypes.c_int64
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

    def last_error(self, pending: int = 0) -> int:
        """The last error of the runtime, which `pending` then is."""
        return self._native.simt_last_error(pending)

    @contextlib.contextmanager
    def running(self, *, order="forward", processors=MULTIPROCESSORS, fill=ALL_ONES):
        """Launches on a device of so many multiprocessors, with this order of threads, in a
        workspace filled with `fill`. With none, one block reads a row."""
        self._native.simt_order(*ORDERS[order])
        self._native.simt_device(processors)
        self._native.simt_workspace(fill)
        try:
            yield
        finally:
            self._native.simt_order(*ORDERS["forward"])
            self._native.simt_device(MULTIPROCESSORS)
            self._native.simt_workspace(ALL_ONES)

    @contextlib.contextmanager
    def working_in(self, workspace: torch.Tensor):
        """Launches in these bytes as they are; one that needs more raises."""
        self._native.simt_own_workspace(workspace.data_ptr(), len(workspace))
        try:
            yield
        finally:
            self._native.simt_own_workspace(None, 0)

    def last_bytes(self) -> int:
        """The size of the workspace of the last call."""
        return self._native.simt_last_bytes()

    def last_written(self) -> int:
        """How many bytes of the workspace the last launch wrote, with another value than before."""
        return self._native.simt_last_written()

    def words_at(self, byte: int, n: int) -> list[int]:
        """So many words of the workspace after the last call, from the first line of 64 bytes on
        that begins `byte` or more behind its beginning."""
        out = (ctypes.c_uint64 * n)()
        self._native.simt_words_at(ctypes.c_int64(byte), ctypes.c_int64(n), out)
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

    def arrive(self, ticket: int, launch: int, count: int, skips: bool) -> tuple[bool, bool, int]:
        """Whether this arrival is the last, whether one was skipped; and the ticket after it."""
        word = ctypes.c_uint64(ticket)
        words = (ctypes.c_uint64(launch), ctypes.c_uint(count), ctypes.c_bool(skips))
        got = self._native.simt_arrive(ctypes.byref(word), *words)
        return bool(got & 1), bool(got & 2), word.value

    def limit(self, word: int, launch: int, lower_to: int = -1) -> tuple[int, int]:
        """The limit in a word, after it is lowered if asked; and the word."""
        out = ctypes.c_uint64(word)
        got = self._native.simt_limit(ctypes.byref(out), ctypes.c_uint64(launch), lower_to)
        return got, out.value

    def largest(self, maxima: list[float]) -> float:
        """The maximum of a row whose warp tiles have these."""
        self._native.simt_largest.restype = ctypes.c_float
        return self._native.simt_largest((ctypes.c_float * len(maxima))(*maxima), len(maxima))

    def warp_mass(self, weight: float) -> float:
        """The mass of a warp tile whose entries all have this weight, in units of the weight 1."""
        out = ctypes.c_int64()
        return self._native.simt_warp_mass(weight, ctypes.byref(out)) ** -1 * out.value


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
