"""Checks of what no op validates: arguments of `compat` and `sharded`, and states.

Ops are validated in C++, see validation.py. Every check here raises RuntimeError too, and the
message names the argument, the rule and the value.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def float32(value: float) -> float:
    """The float32 nearest to a scalar, which the kernels compute with."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def shape(t: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in t.shape) + "]"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def device_name(device: torch.device) -> str:
    """The device as messages write it: cpu, cuda:1; other devices by their type."""
    return f"cuda:{device.index}" if device.type == "cuda" else device.type


def check_same_device(name: str, t: Tensor, device: torch.device, of: str) -> None:
    require(
        t.device == device,
        f"{name} must be on the device of {of}, {device_name(device)}, got {device_name(t.device)}",
    )


def check_ids(name: str, t: Tensor) -> None:
    require(t.dtype in IDS, f"{name} must be int32 or int64, got {dtype_name(t.dtype)}")


def check_typed(name: str, t: Tensor, dtype: torch.dtype, device: torch.device, of: str) -> None:
    require(t.dtype == dtype, f"{name} must be {dtype_name(dtype)}, got {dtype_name(t.dtype)}")
    check_same_device(name, t, device, of)


def check_vector(
    name: str, t: Tensor, n: int, dtype: torch.dtype, device: torch.device, of: str
) -> None:
    """The tensor must be [n] of one dtype; any stride."""
    require(t.dim() == 1 and t.shape[0] == n, f"{name} must be [{n}], got {shape(t)}")
    check_typed(name, t, dtype, device, of)


def check_matrix(
    name: str,
    t: Tensor,
    dims: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    of: str,
) -> None:
    """The tensor must be [*sizes] of one dtype; `dims` names the dimensions in the message."""
    require(t.shape == sizes, f"{name} must be {dims} = {list(sizes)}, got {shape(t)}")
    check_typed(name, t, dtype, device, of)
