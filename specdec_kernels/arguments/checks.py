"""Argument checks shared by the fake kernels, the Triton provider and the reference.

Those of one op stand in _sample_arguments.py, _chain_arguments.py and _tree_arguments.py (what the
last two share in _verify_arguments.py and _draft_arguments.py), those of the cache ops in
_kv_checks.py, those of the small tree ops in _tree_layout_checks.py. The C++ binding
(csrc/torch/checks.h, kv_caches.h) makes the same checks with the same words; tests/test_errors.py
and tests/test_tree_layout_errors.py hold the two together by tables.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def float32(value: float) -> float:
    """The float32 nearest to a scalar: what the kernels compute with, and so what is judged."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def shape(t: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in t.shape) + "]"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    require(value in allowed, f"{name} must be one of {', '.join(allowed)}, got {value}")


def device_name(device: torch.device) -> str:
    """cpu, cuda:1; other devices by their type."""
    return f"cuda:{device.index}" if device.type == "cuda" else device.type


def same_device(name: str, t: Tensor, device: torch.device, of: str) -> None:
    require(
        t.device == device,
        f"{name} must be on the device of {of}, {device_name(device)}, got {device_name(t.device)}",
    )


def ids(name: str, t: Tensor) -> None:
    require(t.dtype in IDS, f"{name} must be int32 or int64, got {dtype_name(t.dtype)}")


def typed(name: str, t: Tensor, dtype: torch.dtype, device: torch.device, of: str) -> None:
    require(t.dtype == dtype, f"{name} must be {dtype_name(dtype)}, got {dtype_name(t.dtype)}")
    same_device(name, t, device, of)


def vector(name: str, t: Tensor, n: int, dtype: torch.dtype, device: torch.device, of: str) -> None:
    """[n] of one dtype; any stride."""
    require(t.dim() == 1 and t.shape[0] == n, f"{name} must be [{n}], got {shape(t)}")
    typed(name, t, dtype, device, of)


def matrix(
    name: str,
    t: Tensor,
    dims: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    of: str,
) -> None:
    """[*sizes] of one dtype; dims names them."""
    require(t.shape == sizes, f"{name} must be {dims} = {list(sizes)}, got {shape(t)}")
    typed(name, t, dtype, device, of)


def rows(name: str, t: Tensor) -> None:
    """A tensor whose last dimension is one vocabulary row."""
    require(
        t.dtype in FLOATS,
        f"{name} must be float32, bfloat16 or float16, got {dtype_name(t.dtype)}",
    )
    size = t.shape[-1]
    require(
        1 <= size < 2**31,
        f"{name} must have a vocabulary of 1 to 2147483647 entries, got {shape(t)}",
    )
    require(
        t.stride(-1) == 1 or size == 1,
        f"{name} must have a contiguous last dimension, got stride {t.stride(-1)}",
    )
