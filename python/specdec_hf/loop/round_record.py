"""The counts and times of one round; `SpecStats.round_log` holds one record for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

PHASES = ("draft", "target", "verification", "cache", "host")


@dataclass
class RoundRecord:
    """One forward of the target over the batch, and the drafts that it verified.

    The phases of a round add up to its duration. On a GPU the first two only queue their work, and
    ``verification`` includes the wait for it.

    Attributes:
        began: seconds from the start of the call to the start of the round.
        draft: seconds of drafting.
        target: seconds of the target's forward.
        verification: seconds of logits processors, of the op that decides, and of reading its
            verdict.
        cache: seconds of the target's cache: positions and masks, compaction and roll back. It is
            measured for the cache "spec"; the others do such work within the forward.
        host: seconds of all else: commit, statistics, schedule.
        drafted: [B] tokens that were drafted for each sequence, 0 for those that had ended.
        accepted: [B] how many of them were committed.
        emitted: [B] committed tokens, the recovered or bonus token included.
        schedule: what `Schedule.record` gives of the round, by name, ready for JSON.
    """

    began: float
    draft: float
    target: float
    verification: float
    cache: float
    host: float
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    schedule: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration of the round."""
        return self.draft + self.target + self.after_target

    @property
    def after_target(self) -> float:
        """Seconds of verification, cache and host."""
        return self.verification + self.cache + self.host

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Phases:
    """Adds up the seconds of a round, phase by phase.

    Work on the cache, which happens within the phases, is taken out of them and counted by itself.
    That, and where the host's own work begins, is measured by the real clock only: with another
    one, all that follows the target's forward is verification.

    Args:
        clock: gives seconds.
        runner: the target's, whose ``watch`` counts the seconds of its own work if it has one.

    Attributes:
        seconds: so far, by the names in `PHASES`.
    """

    def __init__(self, clock: Callable[[], float], runner: Any) -> None:
        self.clock, self._watch = clock, getattr(runner, "watch", None)
        self.real = clock is time.perf_counter
        self.seconds: dict[str, Any] = dict.fromkeys(PHASES, 0.0)
        self._phase = PHASES[0]
        self.began = self._last = clock()
        self._cached = self._cache_seconds()

    def __call__(self, phase: str) -> Phases:
        """For ``with``: count the seconds to a phase, until the next one begins."""
        if phase != self._phase and (self.real or self._phase != "verification"):
            self.stop()
            self._phase = phase
        return self

    def __enter__(self) -> None:
        """Do nothing: a generator would take as long as the clock."""

    def __exit__(self, *error: object) -> None:
        """Do nothing, as what follows belongs to the phase too."""

    def stop(self) -> None:
        """Count the seconds since the last time to the phase under way."""
        now, cached = self.clock(), self._cache_seconds()
        self.seconds["cache"] += cached - self._cached
        self.seconds[self._phase] += now - self._last - (cached - self._cached)
        self._last, self._cached = now, cached

    def _cache_seconds(self) -> float:
        return 0.0 if self._watch is None or not self.real else self._watch.seconds
