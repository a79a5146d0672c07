"""Sampling parameters as the ops take them: a tensor [B] or, where it is None, one scalar."""

from __future__ import annotations

import torch
from torch import Tensor

Param = float | Tensor


def split(value: Param, dtype: torch.dtype, off: float) -> tuple[Tensor | None, float]:
    """A scalar, or a vector in the dtype the kernels read, and the scalar that is unused then."""
    if isinstance(value, Tensor) and value.dim() > 0:
        return value.to(dtype), off
    return None, float(value)


def sampling(
    temperature: Param, top_k: int | Tensor, top_p: Param, min_p: Param
) -> tuple[Tensor | None, float, Tensor | None, int, Tensor | None, float, Tensor | None, float]:
    """The eight sampling arguments of the ops, in schema order."""
    t, t0 = split(temperature, torch.float32, 1.0)
    k, k0 = split(top_k, torch.int32, 0)
    p, p0 = split(top_p, torch.float32, 1.0)
    m, m0 = split(min_p, torch.float32, 0.0)
    return t, t0, k, int(k0), p, p0, m, m0
