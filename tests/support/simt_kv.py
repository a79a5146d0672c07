"""The CUDA kernels of the cache ops as ops on CPU tensors, as simt_ops.py has the others."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch
from support import simt_ops

SOURCE = simt_ops.ROOT / "tests/simt/kv.cpp"
# Misaligned words and signed overflow, which a CPU forgives and a GPU does not.
SANITIZE = ("-fsanitize=undefined", "-fno-sanitize=vptr")

available = simt_ops.available and SOURCE.exists()


class Library:
    """The built library: its ops by name, and switches for the tests."""

    def __init__(self, path: Path, sanitized: bool) -> None:
        torch.ops.load_library(path)
        self.sanitized = sanitized
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


def _compile(folder: Path, flags: tuple[str, ...]):
    out = folder / "libspecdec_simt_kv.so"
    torch_library = simt_ops.TORCH / "lib/libtorch_cpu.so"
    command = [*simt_ops.COMPILE, "-O1", "-shared", *flags, SOURCE, "-o", out, torch_library]
    return subprocess.run(command, capture_output=True, text=True, check=False), out


@functools.cache
def library() -> Library:
    """Built once in each process, because the ops can be registered only once."""
    with tempfile.TemporaryDirectory() as name:
        done, out = _compile(Path(name), SANITIZE)
        sanitized = done.returncode == 0
        if not sanitized and "ubsan" in done.stderr:  # g++ without its sanitizer library
            done, out = _compile(Path(name), ())
        assert done.returncode == 0, done.stderr
        return Library(out, sanitized)
