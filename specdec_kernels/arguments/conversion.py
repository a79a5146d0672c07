"""Conversion of what users pass to public functions into what the native ops take.

A wrong type raises TypeError here, an unknown name RuntimeError. Shapes, dtypes, devices and values
are validated by the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeVar

import torch
from torch import Tensor

from .values import shown

Param = float | Tensor
T = TypeVar("T")
_INT32 = 2**31 - 1
# While torch.compile or torch.export traces a size, it is a SymInt.
_INTEGERS = (int, torch.SymInt, Integral)
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt, Real)


def require_tensor(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(value)}")
    return value


def require_tensor_or_none(value: object, name: str) -> Tensor | None:
    return None if value is None else require_tensor(value, name)


def require_tensors(**tensors: object) -> None:
    for name, value in tensors.items():
        require_tensor(value, name)


def require_tensors_or_none(**tensors: object) -> None:
    for name, value in tensors.items():
        require_tensor_or_none(value, name)


def require_tensor_list(values: object, name: str) -> list[Tensor]:
    """Caches or states as a list, one tensor for each layer."""
    if isinstance(values, Tensor) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of tensors, got {type(values).__name__}")
    for i, value in enumerate(values):
        if not isinstance(value, Tensor):  # the name costs time, so it is built only on failure
            require_tensor(value, f"{name}[{i}]")
    return list(values)


def require_number(value: T, name: str) -> T:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    return value


def require_integer(value: T, name: str) -> T:
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    return value


def vector_and_scalar(value: Param, name: str, default: float) -> tuple[Tensor | None, float]:
    """The two forms in which an op takes a number: a float32 vector [B], or None and a scalar.

    Where the vector is given, the op ignores the scalar, which is `default` then.
    """
    if isinstance(value, Tensor):
        return _vector(value, name).to(torch.float32), default
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or a tensor, got {shown(value)}")
    return None, float(value)


def vector_and_count(value: int | Tensor, name: str, default: int) -> tuple[Tensor | None, int]:
    """As `vector_and_scalar`, for counts in int32.

    Counts are clamped: one beyond int32 keeps every token, and a negative one stays negative.
    """
    if isinstance(value, Tensor):
        if value.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {value.dtype}")
        return to_int32(_vector(value, name)), default
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer or a tensor, got {shown(value)}")
    return None, min(int(value), _INT32)


def to_int32(value: Tensor) -> Tensor:
    """Integers in int32, those beyond it as its nearest one."""
    if value.dtype == torch.int32:
        return value
    return value.clamp(-_INT32 - 1, _INT32).to(torch.int32)


def _vector(value: Tensor, name: str) -> Tensor:
    # To read a 0-dim tensor as a scalar would make the host wait for the device.
    if value.dim() == 0:
        raise ValueError(f"{name} must be a number or a tensor [B], got a 0-dim tensor")
    return value


def sampling(
    temperature: Param, top_k: int | Tensor, top_p: Param, min_p: Param
) -> tuple[Tensor | None, float, Tensor | None, int, Tensor | None, float, Tensor | None, float]:
    """The eight sampling arguments of the ops, in the order of their schemas."""
    t, t0 = vector_and_scalar(temperature, "temperature", 1.0)
    k, k0 = vector_and_count(top_k, "top_k", 0)
    p, p0 = vector_and_scalar(top_p, "top_p", 1.0)
    m, m0 = vector_and_scalar(min_p, "min_p", 0.0)
    return t, t0, k, k0, p, p0, m, m0
