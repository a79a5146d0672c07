"""Loads the native library and says which provider serves each op on each device."""

from __future__ import annotations

import importlib.util
import os
import warnings
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

_TRITON_ONLY = (
    "tree_attention",
    "rerank_tree",
    "build_trie",
    "expand_tree",
)
CACHE_OPS = (
    "kv_append_",
    "kv_truncate_",
    "kv_compact_",
    "paged_compact_",
    "paged_truncate_",
    "kv_realign_",
    "ring_truncate_",
)
OPS = (
    "sample",
    "verify_chain",
    "verify_tree",
    *CACHE_OPS,
    *_TRITON_ONLY,
)

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_cuda_kernels() -> bool:
    """Whether `_C.so` was built with its CUDA kernels."""
    return bool(torch.ops.specdec_kernels.built_with_cuda.default())


def _cuda_provider() -> str:
    """Who serves the ops on CUDA devices, but for `_TRITON_ONLY`: cuda, triton or none.

    SPECDEC_CUDA_PROVIDER asks for one; else it is the CUDA kernels where `_C.so` has them.
    """
    asked = os.environ.get("SPECDEC_CUDA_PROVIDER", "")
    there = {"cuda": has_cuda_kernels(), "triton": _HAS_TRITON}
    if asked:
        if asked not in there:
            raise ImportError(
                f"SPECDEC_CUDA_PROVIDER must be one of {', '.join(there)}, got {asked}"
            )
        if not there[asked]:
            lacks = {"cuda": "_C.so has no CUDA kernels", "triton": "triton is not installed"}
            raise ImportError(f"SPECDEC_CUDA_PROVIDER is {asked}, but {lacks[asked]}")
        return asked
    return next((name for name, is_there in there.items() if is_there), "none")


_CUDA_PROVIDER = _cuda_provider()
if _CUDA_PROVIDER == "triton":
    with warnings.catch_warnings():
        # That it takes the place of the CUDA kernels is what was asked for.
        warnings.filterwarnings(
            "ignore", message=".*[Oo]verriding a previously registered kernel.*"
        )
        for _op in OPS:
            _triton.register(_op)

if _HAS_TRITON:
    for _op in _TRITON_ONLY:
        _triton.register(_op)


def cpu_capability() -> str:
    """The instruction set the CPU kernels run on here: avx512, avx2 or plain."""
    return str(torch.ops.specdec_kernels.cpu_capability.default())


def providers() -> dict[str, dict[str, str]]:
    """Op name -> device type -> provider ("cpp", "cuda", "triton" or "none")."""
    on_cuda = dict.fromkeys(OPS, _CUDA_PROVIDER)
    on_cuda |= dict.fromkeys(_TRITON_ONLY, "triton" if _HAS_TRITON else "none")
    return {op: {"cpu": "cpp", "cuda": on_cuda[op]} for op in OPS}
