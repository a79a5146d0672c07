"""The CUDA kernels of the cache ops as ops on CPU tensors, as simt_ops.py has the others."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
from pathlib import Path

import torch
from support import simt_ops
from support.shared_build import built_once

SOURCE = simt_ops.ROOT / "tests/simt/kv.cpp"
# Misaligned words and signed overflow, which a CPU forgives and a GPU does not.
SANITIZE = ("-fsanitize=undefined", "-fno-sanitize=vptr")

available = simt_ops.available and SOURCE.exists()


class Library:
    """The built library: its ops by name, and switches for the tests."""

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(path)
        self.sanitized = b"libubsan" in path.read_bytes()
        self._native = ctypes.CDLL(str(path))
        self._native.simt_launches.restype = ctypes.c_int64
        self._native.simt_misaligned_load.argtypes = [ctypes.c_void_p]

    def op(self, name: str):
        return getattr(torch.ops.specdec_kernels_simt_kv, name).default

    @contextlib.contextmanager
    def order(self, *, reverse: bool):
        self._native.simt_reverse(reverse)
        try:
            yield
        finally:
            self._native.simt_reverse(False)

    def launches(self) -> int:
        return self._native.simt_launches()

    def misaligned_load(self, address: int) -> int:
        return self._native.simt_misaligned_load(address)


def compile_sanitized(out: Path, *command: str | Path) -> None:
    """Compile a library with the sanitizer, or without it if g++ has not got its library."""
    command = (*command, "-shared", "-o", out)
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run((*command, *SANITIZE))
    if done.returncode != 0 and "ubsan" in done.stderr:
        done = run(command)
    assert done.returncode == 0, done.stderr


def build(out: Path) -> None:
    torch_library = simt_ops.TORCH / "lib/libtorch_cpu.so"
    compile_sanitized(out, *simt_ops.COMPILE, "-O1", SOURCE, torch_library)


@functools.cache
def library() -> Library:
    """Loaded once in each process, because the ops can be registered only once."""
    return Library(built_once("libspecdec_simt_kv.so", build))
