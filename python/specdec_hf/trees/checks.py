"""Checks of the numbers that describe a tree; each names the argument, the rule and the value."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

MAX_NODES = 1024


def check_sequence(name: str, values: Any) -> list[Any]:
    """The values as a list."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence, got {values!r}")
    return list(values)


def check_integers(name: str, values: Any) -> tuple[int, ...]:
    """The values as integers."""
    listed = check_sequence(name, values)
    for n, value in enumerate(listed):
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name}[{n}] must be an integer, got {value!r}")
    return tuple(int(value) for value in listed)


def check_integer(name: str, value: Any, least: int, most: int = MAX_NODES) -> int:
    """The value as an integer in [least, most]."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) <= most:
        raise ValueError(f"{name} must be an integer in [{least}, {most}], got {value!r}")
    return int(value)


def check_probabilities(name: str, values: Any) -> list[float]:
    """The values as probabilities, at least one of them."""
    listed = check_sequence(name, values)
    if not listed:
        raise ValueError(f"{name} must have at least one entry, got none")
    for k, value in enumerate(listed):
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not 0 <= float(value) <= 1:
            raise ValueError(f"{name}[{k}] must be in [0, 1], got {value!r}")
    return [float(value) for value in listed]
