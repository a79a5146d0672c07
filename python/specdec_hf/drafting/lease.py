"""A drafter keeps the state of one call, so two calls must not use it at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

_holders: dict[int, object] = {}  # id of a drafter -> the mark of the lease that holds it


class Lease:
    """Holds drafters for one call until it is released, or nothing refers to it any more.

    Args:
        drafters: what the call uses.

    Raises:
        RuntimeError: another lease holds one of them.
        ValueError: one of them is listed twice.
    """

    def __init__(self, drafters: Iterable[Any]) -> None:
        mark, held = object(), list[Any]()
        self._finalizer = weakref.finalize(self, _release, held)
        for drafter in drafters:
            # setdefault is atomic: of two threads, one gets the drafter.
            holder = _holders.setdefault(id(drafter), mark)
            if holder is mark and not any(drafter is other for other in held):
                held.append(drafter)
                continue
            self.release()
            name = type(drafter).__name__
            if holder is mark:
                raise ValueError(f"drafter must hold an object once, got one {name} twice")
            raise RuntimeError(
                f"drafter must serve one call at a time, got a {name} that another call is using; "
                "make one for each call"
            )

    @property
    def held(self) -> bool:
        """Whether it has not been released."""
        return self._finalizer.alive

    def release(self) -> None:
        """Let other calls have the drafters. Another release does nothing."""
        self._finalizer()


def _release(held: list[Any]) -> None:
    for drafter in held:
        del _holders[id(drafter)]
