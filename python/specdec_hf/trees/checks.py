"""Checks of the numbers that describe a tree; each names the argument, the rule and the value.

A wrong type is a TypeError, a wrong value a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

MAX_NODES = 1024


def check_sequence(name: str, values: Any) -> list[Any]:
    """The values as a list."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence, got {values!r}")
    return list(values)


def check_integers(name: str, values: Any) -> tuple[int, ...]:
    """The values as integers."""
    listed = check_sequence(name, values)
    for n, value in enumerate(listed):
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name}[{n}] must be an integer, got {value!r}")
    return tuple(int(value) for value in listed)


def check_integer(name: str, value: Any, least: int, most: int = MAX_NODES) -> int:
    """The value as an integer in [least, most]."""
    message = f"{name} must be an integer in [{least}, {most}], got {value!r}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(message)
    if not least <= int(value) <= most:
        raise ValueError(message)
    return int(value)


def check_probabilities(name: str, values: Any) -> list[float]:
    """The values as probabilities, at least one of them."""
    listed = check_sequence(name, values)
    if not listed:
        raise ValueError(f"{name} must have at least one entry, got none")
    for k, value in enumerate(listed):
        message = f"{name}[{k}] must be in [0, 1], got {value!r}"
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(message)
        if not 0 <= float(value) <= 1:
            raise ValueError(message)
    return [float(value) for value in listed]
