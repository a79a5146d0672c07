"""The checks that the validation of every op is made of.

Fake kernels, the Triton provider and the reference validate their arguments in Python: those of
`sample` in sample.py, of `verify_chain` in chain.py, of `verify_tree` in tree.py (with what both
verifiers share in verification.py and draft.py), of the cache ops in kv.py and of the ops on tree
layouts in tree_layout.py. The C++ bindings validate in csrc/arguments and csrc/torch/arguments, in
the same order and with the same messages. The tables of bad inputs in tests/project/test_errors.py
and tests/tree/test_tree_layout_errors.py keep both equal.

Every check raises RuntimeError, and the message names the argument, the rule and the value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)
MAX_ENTRIES = 2**56


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def float32(value: float) -> float:
    """The float32 nearest to a scalar: the kernels compute with it, so it is what is checked."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def shape(t: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in t.shape) + "]"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def check_entries(name: str, what: str, dims: str, *sizes: int) -> None:
    """What an op allocates must have so few entries that no index and no size in bytes overflows.

    Expanded and empty tensors may have any sizes without holding memory.
    """
    require(
        math.prod(max(n, 1) for n in sizes) < MAX_ENTRIES,
        f"{name} must leave {what} {dims} with less than 2**56 entries, "
        f"got [{', '.join(str(n) for n in sizes)}]",
    )


def check_number(name: str, value: int, names: Sequence[str]) -> None:
    """The value must be the number of a name."""
    require(0 <= value < len(names), f"{name} must be in [0, {len(names) - 1}], got {value}")


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


def check_rows(name: str, t: Tensor) -> None:
    """The last dimension must be a vocabulary that kernels can read: dtype, size, stride."""
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
