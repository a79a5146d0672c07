"""Validation of the numbers that suffix automata and corpora take."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from specdec_host.arguments.values import shown

MAX_MATCH = 2**16


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """The value as an int.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is not in [minimum, maximum].
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    number = int(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number


def check_chains(gamma: Any, count: Any) -> tuple[int, int]:
    """Validate how long and how many drafted chains may be."""
    gamma, count = check_integer("gamma", gamma, 1), check_integer("count", count, 1)
    if gamma * count > 2**24:
        raise ValueError(f"gamma * count must be at most {2**24}, got {gamma} * {count}")
    return gamma, count


def check_probability(name: str, value: Any) -> float:
    """The value as a float.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not in [0, 1].
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    number = float(value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {number}")
    return number
