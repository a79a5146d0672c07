"""The seconds of a round by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specdec_hf.decode.round_record import PHASES


class Phases:
    """Adds up the seconds of a round, phase by phase.

    Work on the cache, which happens within the phases, is taken out of them and counted by itself.
    That, and where the host's own work begins, is measured by the real clock only: with another
    one, all that follows the target's forward is verification.

    Args:
        clock: gives seconds.
        cache: the target's, whose ``watch`` counts the seconds of its own work if it has one.

    Attributes:
        seconds: so far, by the names in `PHASES`.
    """

    def __init__(self, clock: Callable[[], float], cache: Any) -> None:
        self.clock, self._watch = clock, getattr(cache, "watch", None)
        self.real = clock is time.perf_counter
        self.seconds: dict[str, Any] = dict.fromkeys(PHASES, 0.0)
        self._phase = PHASES[0]
        self.began = self._last = clock()
        self._cached = self._cache_seconds()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the seconds within to a phase, and what follows until the next one, too."""
        if phase != self._phase and (self.real or self._phase != "verification"):
            self.stop()
            self._phase = phase
        yield

    def stop(self) -> None:
        """Count the seconds since the last time to the phase under way."""
        now, cached = self.clock(), self._cache_seconds()
        self.seconds["cache"] += cached - self._cached
        self.seconds[self._phase] += now - self._last - (cached - self._cached)
        self._last, self._cached = now, cached

    def _cache_seconds(self) -> float:
        return 0.0 if self._watch is None or not self.real else self._watch.seconds
