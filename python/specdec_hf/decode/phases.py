"""The seconds of a round by phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from specdec_hf.cache.stopwatch import Stopwatch
from specdec_hf.decode.round_record import PHASES


class Phases:
    """Adds up the seconds of a round, phase by phase.

    Work on the cache, which happens within the phases, is taken out of them and counted by itself.
    That, and where the host's own work begins, is measured by the real clock only.

    Args:
        clock: gives seconds.
        watch: that of the target's cache, None for caches that have none.
    """

    def __init__(self, clock: Callable[[], float], watch: Stopwatch | None) -> None:
        self.clock, self.watch = clock, watch
        self.real = clock is time.perf_counter
        self.seconds: dict[str, Any] = dict.fromkeys(PHASES, 0.0)
        self.began = self._last = clock()
        self._cached = self._cache_seconds()

    def end(self, phase: str) -> None:
        """Count the seconds since the last call, or since the beginning, to a phase."""
        now, cached = self.clock(), self._cache_seconds()
        self.seconds["cache"] += cached - self._cached
        self.seconds[phase] += now - self._last - (cached - self._cached)
        self._last, self._cached = now, cached

    def end_if_real(self, phase: str) -> None:
        """As `end`; with another clock than the real one the seconds go to the next phase."""
        if self.real:
            self.end(phase)

    def _cache_seconds(self) -> float:
        return 0.0 if self.watch is None or not self.real else self.watch.seconds
