"""Loads the native library and says which provider serves each op on each device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from specdec_kernels import triton as _triton

_LIBRARY = Path(__file__).with_name("_C.so")


def _load() -> None:
    if not _LIBRARY.exists():
        raise ImportError(
            f"{_LIBRARY.name} is missing beside specdec_kernels: the native library was not built. "
            "Install with: pip install --no-build-isolation ."
        )
    try:
        torch.ops.load_library(_LIBRARY)
    except OSError as error:
        raise ImportError(
            f"{_LIBRARY.name} does not load under torch {torch.__version__}: {error}"
        ) from error


_load()
if importlib.util.find_spec("triton"):
    _triton.register()

OPS = ("sample", "verify_chain", "kv_append_", "kv_truncate_")


def has_cuda_kernels() -> bool:
    """Whether `_C.so` was built with its CUDA kernels."""
    return bool(torch.ops.specdec_kernels.built_with_cuda.default())


def cpu_capability() -> str:
    """The instruction set the CPU kernels run on here: avx512, avx2 or plain."""
    return str(torch.ops.specdec_kernels.cpu_capability.default())


def providers() -> dict[str, dict[str, str]]:
    """Op name -> device type -> provider ("cpp", "cuda", "triton" or "none")."""
    triton = "triton" if importlib.util.find_spec("triton") else "none"
    cuda = "cuda" if has_cuda_kernels() else "none"
    return {op: {"cpu": "cpp", "cuda": cuda if op.startswith("kv_") else triton} for op in OPS}
