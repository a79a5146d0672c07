"""Argument checks shared by the fake kernels, the Triton provider and the reference.

Those of `verify_chain` stand in _chain_arguments.py, those of the cache ops in _kv_checks.py. The
C++ binding (csrc/torch/checks.h, kv_caches.h) makes the same checks with the same words;
tests/test_errors.py holds the two together by the table in tests/error_table.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

STREAMS = {"residual": 1, "draft": 2, "shared": 3}
METHODS = ("cdf", "race")
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


def vector(name: str, t: Tensor, n: int, dtype: torch.dtype, device: torch.device, of: str) -> None:
    """[n] of one dtype; any stride."""
    require(t.dim() == 1 and t.shape[0] == n, f"{name} must be [{n}], got {shape(t)}")
    require(t.dtype == dtype, f"{name} must be {dtype_name(dtype)}, got {dtype_name(t.dtype)}")
    same_device(name, t, device, of)


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


def sampling(
    n: int,
    device: torch.device,
    of: str,
    temperatures: Tensor | None,
    temperature: float,
    top_ks: Tensor | None,
    top_k: int,
    top_ps: Tensor | None,
    top_p: float,
    min_ps: Tensor | None,
    min_p: float,
) -> None:
    """A tensor wins over its scalar; scalars are range checked, tensor values are data."""
    temperature, top_p, min_p = (float32(x) for x in (temperature, top_p, min_p))
    if temperatures is not None:
        vector("temperature", temperatures, n, torch.float32, device, of)
    else:
        require(
            math.isfinite(temperature) and temperature >= 0,
            f"temperature must be finite and at least 0, got {temperature:g}",
        )
    if top_ks is not None:
        vector("top_k", top_ks, n, torch.int32, device, of)
    else:
        require(top_k >= 0, f"top_k must be at least 0 (0 keeps every token), got {top_k}")
    if top_ps is not None:
        vector("top_p", top_ps, n, torch.float32, device, of)
    else:
        require(0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p:g}")
    if min_ps is not None:
        vector("min_p", min_ps, n, torch.float32, device, of)
    else:
        require(0 <= min_p <= 1, f"min_p must be in [0, 1], got {min_p:g}")


def sample(
    logits: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    top_ks: Tensor | None,
    top_k: int,
    top_ps: Tensor | None,
    top_p: float,
    min_ps: Tensor | None,
    min_p: float,
    seeds: Tensor,
    positions: Tensor,
    stream: str,
    method: str,
) -> None:
    require(logits.dim() == 2, f"logits must be [R, V], got {shape(logits)}")
    rows("logits", logits)
    n, dev = logits.shape[0], logits.device
    sampling(
        n, dev, "logits", temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p
    )
    vector("seeds", seeds, n, torch.int64, dev, "logits")
    vector("positions", positions, n, torch.int64, dev, "logits")
    one_of("stream", stream, tuple(STREAMS))
    one_of("method", method, METHODS)
    require(
        stream != "shared" or method == "race",
        "method must be race when stream is shared, got cdf",
    )
