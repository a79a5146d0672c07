"""The CUDA kernels of the cache ops as ops on CPU tensors, as emulator.py has the others."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path

import torch
from simt import emulator
from support.shared_build import built_once

SOURCE = emulator.ROOT / "tests/simt/kv.cpp"

available = emulator.available and SOURCE.exists()


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


def build(out: Path) -> None:
    torch_library = emulator.TORCH / "lib/libtorch_cpu.so"
    emulator.compile_sanitized(out, *emulator.COMPILE, "-O1", SOURCE, torch_library)


@functools.cache
def library() -> Library:
    """Loaded once in each process, because the ops can be registered only once."""
    return Library(built_once("libspecdec_simt_kv.so", build))
