"""Conversion of what users pass to public functions into what the native ops take.

A wrong type raises TypeError here, an unknown name RuntimeError. Shapes, dtypes and values are
validated by the ops, in csrc/arguments.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_host.arguments.arrays import Array, Param, array_of, to_float
from specdec_host.arguments.values import shown

Vector = NDArray[Any] | None
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1


def require_number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    return float(value)


def require_integer(value: object, name: str) -> int:
    """The value, cut to 64 bits: no integer beyond them is in range anywhere."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    return min(max(int(value), -_INT64 - 1), _INT64)


def vector_and_scalar(value: Param, name: str, default: float) -> tuple[Vector, float]:
    """The two forms in which an op takes a number: a float32 vector [B], or None and a scalar.

    Where the vector is given, the op ignores the scalar, which is `default` then.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        return None, float(value)
    return to_float(_vector(value, name, "number"), name, np.float32), default


def vector_and_count(value: int | Array, name: str, default: int) -> tuple[Vector, int]:
    """As `vector_and_scalar`, for counts in int32.

    Counts are clamped: one beyond int32 keeps every token, and a negative one stays negative.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        return None, min(max(int(value), -_INT32 - 1), _INT32)
    vector = _vector(value, name, "integer")
    if vector.dtype not in (np.int32, np.int64):
        raise ValueError(f"{name} must be int32 or int64, got {vector.dtype}")
    return to_int32(vector), default


def to_int32(integers: NDArray[Any]) -> NDArray[np.int32]:
    """Those beyond int32 as its nearest one."""
    return integers.clip(-_INT32 - 1, _INT32).astype(np.int32, copy=False)


def _vector(value: object, name: str, scalar: str) -> NDArray[Any]:
    vector = None if isinstance(value, bool | Real) else array_of(value, name)
    if vector is None:
        article = "an" if scalar == "integer" else "a"
        raise TypeError(f"{name} must be {article} {scalar} or an array, got {shown(value)}")
    if vector.ndim == 0:
        raise ValueError(f"{name} must be a number or an array [B], got a 0-dim array")
    return vector


def sampling(
    temperature: Param, top_k: int | Array, top_p: Param, min_p: Param
) -> tuple[Vector, float, Vector, int, Vector, float, Vector, float]:
    """The eight sampling arguments of the ops, in the order of their schemas."""
    t, t0 = vector_and_scalar(temperature, "temperature", 1.0)
    k, k0 = vector_and_count(top_k, "top_k", 0)
    p, p0 = vector_and_scalar(top_p, "top_p", 1.0)
    m, m0 = vector_and_scalar(min_p, "min_p", 0.0)
    return t, t0, k, k0, p, p0, m, m0
