"""Validation of arguments: numbers, sequences, flags, sampling parameters; options within a text.

A wrong type is a TypeError, a number outside its range a ValueError; a bool is not a number here.
`specdec_host`, which needs no package of ours, has its own validation.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard

import numpy as np

_LONGEST = 100  # characters of a value in a message
_SIZED = (str, bytes, list, tuple, dict, set)


class Refused(ValueError):  # in no need of a longer name
    """A call or a model does not go with what was asked for: the reason of what is done instead.

    Every other ValueError is a fault of the program or of an argument, and is never a reason.
    """


class Parameter(NamedTuple):
    """A sampling parameter: the value that changes nothing, and the rule that values must keep."""

    neutral: float | int
    rule: str
    holds: Callable[[Any], bool]


PARAMETERS = {
    "temperature": Parameter(1.0, "finite and >= 0", lambda x: math.isfinite(x) and x >= 0),
    "top_k": Parameter(0, "an integer >= 0", lambda x: x >= 0 and x == int(x)),
    "top_p": Parameter(1.0, "in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": Parameter(0.0, "in [0, 1]", lambda x: 0 <= x <= 1),
}


@contextmanager
def naming_errors(argument: str, value: object) -> Iterator[None]:
    """Errors name the argument and its value, as in ``drafter 'rest:FILE': No such file``."""
    try:
        yield
    except OSError as error:
        kind = type(error)
        if kind.__module__ != "builtins":
            raise  # others may not be made of a message
        made = kind(f"{argument} {str(value)!r}: {error.strerror or error}")
        made.errno = error.errno
        raise made from error
    except ValueError as error:
        if str(error).startswith(argument):
            raise
        raise ValueError(f"{argument} {str(value)!r}: {error}") from error


def shown(value: object) -> str:
    """A value as messages print it: an array, or one with a long text, by its type and size."""
    size = getattr(value, "shape", None)
    if isinstance(size, tuple) and size:
        return f"{type(value).__name__} {list(size)}"
    name = type(value).__name__
    if isinstance(value, _SIZED):
        name += f" of length {len(value)}"
    inner, length = [value], 0  # at least that of its repr, which may be megabytes
    while inner and length <= _LONGEST:
        one = inner.pop()
        if isinstance(one, _SIZED):
            length += len(one) or 1
            if not isinstance(one, str | bytes) and length <= _LONGEST:
                inner += [*one, *one.values()] if isinstance(one, dict) else one
    text = repr(value) if length <= _LONGEST else ""
    return text if 0 < len(text) <= _LONGEST and "\n" not in text else name


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name; empty where no name is close to it.

    >>> did_you_mean("promt_lookup:3", ["ngram", "prompt_lookup"])
    "; did you mean 'prompt_lookup'?"
    """
    close = get_close_matches(name.partition(":")[0].lower(), list(names), 1, 0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def split_options(text: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """A text without the options at its end, and these, as in ``FOLDER:temperature=0.5,top_k=40``.

    Raises:
        ValueError: an option that is there more than once.

    >>> split_options("4,temperature=0.5,top_k=40", ["temperature", "top_k"])
    ('4', {'temperature': '0.5', 'top_k': '40'})
    >>> split_options("a:b,c", ["temperature"])
    ('a:b,c', {})
    """
    one = rf"(?:{'|'.join(names)})=[^,]*"
    found = re.fullmatch(rf"(.*?)(?:^|[:,])({one}(?:,{one})*)", text) if names else None
    if found is None:
        return text, {}
    options: dict[str, str] = {}
    for option in found[2].split(","):
        name, value = option.split("=", 1)
        if name in options:
            raise ValueError(f"{name} must be given once, got {shown(text)}")
        options[name] = value
    return found[1], options


def read_number(name: str, owner: str, text: str, *, integer: bool = False) -> float:
    """The number that an option of a schedule or a drafter has; an int where it is written as one.

    Raises:
        ValueError: the text is no number, or no integer where there must be one.
    """
    written = text.lstrip("+-").isdecimal()
    try:
        return int(text) if integer or written else float(text)
    except ValueError:
        kind = "an integer" if integer else "a number"
        raise ValueError(f"{name} of {owner} must be {kind}, got {text!r}") from None


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer of any type, those of NumPy included."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(
    name: str, value: Any, minimum: int | None = None, maximum: int | None = None
) -> int:
    """The value as an integer in [minimum, maximum]; None leaves a side open.

    >>> check_integer("gamma", 0, 1)
    Traceback (most recent call last):
    ValueError: gamma must be at least 1, got 0
    """
    _check(name, value, "an integer", is_integer(value), minimum, maximum)
    return int(value)


def check_number(
    name: str, value: Any, minimum: float | None = None, maximum: float | None = None
) -> float:
    """The value as a float in [minimum, maximum]; None leaves a side open."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    _check(name, value, "a number", is_number, minimum, maximum)
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be within the range of floats") from None


def _check(
    name: str,
    value: Any,
    kind: str,
    of_kind: bool,
    minimum: float | None,
    maximum: float | None,
) -> None:
    if minimum is not None and maximum is not None:
        kind = rule = f"{kind} in [{minimum}, {maximum}]"
    else:
        rule = f"at least {minimum}" if maximum is None else f"at most {maximum}"
    if not of_kind:
        raise TypeError(f"{name} must be {kind}, got {shown(value)}")
    # A NaN fails both comparisons.
    if not ((minimum is None or value >= minimum) and (maximum is None or value <= maximum)):
        raise ValueError(f"{name} must be {rule}, got {shown(value)}")


def check_flag(name: str, value: Any) -> bool:
    """The value, which must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def check_sequence(name: str, values: Any) -> list[Any]:
    """The values as a list."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence, got {shown(values)}")
    return list(values)


def check_integers(
    name: str, values: Any, minimum: int | None = None, maximum: int | None = None
) -> tuple[int, ...]:
    """The values as integers in [minimum, maximum]; None leaves a side open."""
    listed = check_sequence(name, values)
    if set(map(type, listed)) == {int}:  # token ids, of which there may be very many
        lowest, highest = min(listed), max(listed)
        if (minimum is None or lowest >= minimum) and (maximum is None or highest <= maximum):
            return tuple(listed)
    numbered = enumerate(listed)
    return tuple(check_integer(f"{name}[{n}]", value, minimum, maximum) for n, value in numbered)


def check_keeps(name: str, value: Any, rule: str, holds: Callable[[Any], bool]) -> None:
    """Refuse a number that breaks its rule, as it is or in float32, which the ops read."""
    for x, where in ((value, ""), (ctypes.c_float(value).value, " in float32")):
        if not holds(x):
            raise ValueError(f"{name} must be {rule}{where}, got {shown(value)}")


def check_value(name: str, x: Any) -> None:
    """Refuse a value that the sampling parameter ``name`` cannot have."""
    parameter = PARAMETERS[name]
    message = f"{name} must be {parameter.rule}, got {shown(x)}"
    if isinstance(x, bool | np.bool_):
        raise TypeError(message)
    try:
        valid = parameter.holds(x)
    except TypeError as error:
        raise TypeError(message) from error
    except (ValueError, OverflowError):  # int(x) of a number that is not finite
        valid = False
    if not valid:
        raise ValueError(message)
    if isinstance(parameter.neutral, float):
        check_keeps(name, x, parameter.rule, parameter.holds)
