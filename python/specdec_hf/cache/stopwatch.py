"""Seconds that a cache takes for its own work: masks, positions, roll back, compaction."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """Adds up the seconds of methods that are `timed`."""

    def __init__(self) -> None:
        self.seconds = 0.0


def timed(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method whose seconds are added to the stopwatch of its object, ``watch``."""

    @functools.wraps(method)
    def measured(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        began = time.perf_counter()
        result = method(self, *args, **kwargs)
        self.watch.seconds += time.perf_counter() - began
        return result

    return measured  # type: ignore[return-value]  # mypy takes `self` for a named argument
