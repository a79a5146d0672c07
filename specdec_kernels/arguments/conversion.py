"""Sampling parameters as the ops take them: a tensor [B] or, where it is None, one scalar."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

Param = float | Tensor
_INT32 = 2**31 - 1


def tensor(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {value!r}")


def tensors(**given: object) -> None:
    for name, value in given.items():
        tensor(value, name)


def optional(**given: object) -> None:
    """Of arguments that may be None."""
    for name, value in given.items():
        if value is not None:
            tensor(value, name)


def listed(values: object, name: str) -> list[Tensor]:
    """Caches or states, one tensor a layer."""
    if isinstance(values, Tensor) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a list of tensors, got {type(values).__name__}")
    for i, value in enumerate(values):
        if not isinstance(value, Tensor):  # a name is built only where it is needed
            tensor(value, f"{name}[{i}]")
    return list(values)


def split(value: Param, name: str, off: float) -> tuple[Tensor | None, float]:
    """A scalar, or a float32 vector and the scalar that is unused then."""
    if isinstance(value, Tensor):
        return _vector(value, name).to(torch.float32), off
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number or a tensor, got {value!r}")
    return None, float(value)


def split_int(value: int | Tensor, name: str, off: int) -> tuple[Tensor | None, int]:
    """The same for counts; beyond int32 every token is kept, and a negative one stays so."""
    if isinstance(value, Tensor):
        if value.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {value.dtype}")
        value = _vector(value, name)
        if value.dtype == torch.int64:
            value = value.clamp(-_INT32 - 1, _INT32).to(torch.int32)
        return value, off
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer or a tensor, got {value!r}")
    return None, min(int(value), _INT32)


def _vector(value: Tensor, name: str) -> Tensor:
    # A 0-dim tensor is not read on the host: that would wait for its device.
    if value.dim() == 0:
        raise ValueError(f"{name} must be a number or a tensor [B], got a 0-dim tensor")
    return value


def sampling(
    temperature: Param, top_k: int | Tensor, top_p: Param, min_p: Param
) -> tuple[Tensor | None, float, Tensor | None, int, Tensor | None, float, Tensor | None, float]:
    """The eight sampling arguments of the ops, in schema order."""
    t, t0 = split(temperature, "temperature", 1.0)
    k, k0 = split_int(top_k, "top_k", 0)
    p, p0 = split(top_p, "top_p", 1.0)
    m, m0 = split(min_p, "min_p", 0.0)
    return t, t0, k, k0, p, p0, m, m0
