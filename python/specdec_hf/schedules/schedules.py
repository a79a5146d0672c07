"""How many tokens to draft in the next round, and when to stop drafting because it does not pay."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Protocol


class GammaPolicy(Protocol):
    """Chooses gamma, the number of tokens to draft, from what the last round accepted."""

    def next_gamma(self) -> int: ...

    def observe(self, drafted: int, accepted: int) -> None: ...


class ConstantPolicy:
    """Always the same gamma."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def next_gamma(self) -> int:
        return self.gamma

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class HeuristicPolicy:
    """Two more after a fully accepted draft, one fewer otherwise, within [1, ``gamma_max``]."""

    def __init__(self, gamma: int, gamma_max: int = 16) -> None:
        self.gamma = gamma
        self.gamma_max = max(gamma, gamma_max)

    def next_gamma(self) -> int:
        return self.gamma

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        step = 2 if accepted == drafted else -1
        self.gamma = min(max(self.gamma + step, 1), self.gamma_max)


def make_policy(policy: str, gamma: int) -> GammaPolicy:
    """The policy called ``policy``, starting at ``gamma``.

    Raises:
        ValueError: unknown name.
    """
    if policy not in ("constant", "heuristic"):
        raise ValueError(f"gamma_policy must be 'constant' or 'heuristic', got {policy!r}")
    return ConstantPolicy(gamma) if policy == "constant" or gamma == 0 else HeuristicPolicy(gamma)


class BenefitGuard:
    """Compares speculation with plain decoding as it runs, and stops it while it does not pay.

    benefit = tokens per row and drafting round * plain step time / drafting round time. Below 1
    the guard asks for plain rounds, then lets a few drafting rounds probe again, each time after a
    pause twice as long. Times are whatever the loop's clock gives, so that tests can be exact.

    Args:
        window: drafting rounds that make one judgement.
        pause: plain rounds before the first new probe.
        stops: False only measures and reports.
    """

    def __init__(self, *, window: int = 8, pause: int = 16, stops: bool = True) -> None:
        self.window = window
        self.pause = pause
        self.stops = stops
        self.stopped = 0
        self._plain_times: deque[float] = deque(maxlen=window)
        self._draft_times: deque[float] = deque(maxlen=window)
        self._draft_tokens: deque[float] = deque(maxlen=window)
        self._pause_left = 0
        self._calibrate = True

    @property
    def plain_step(self) -> float | None:
        """Median seconds of a plain round, None before one was seen."""
        return median(self._plain_times) if self._plain_times else None

    @property
    def benefit(self) -> float | None:
        """Measured benefit over the last drafting rounds, None before there is enough to tell."""
        plain = self.plain_step
        if plain is None or not self._draft_times:
            return None
        tokens = sum(self._draft_tokens) / len(self._draft_tokens)
        return tokens * plain / max(median(self._draft_times), 1e-12)

    def allows_drafting(self) -> bool:
        """Whether the next round should draft."""
        if self._pause_left > 0:
            return False
        # Without one plain round there is nothing to compare with; buy it when a verdict is due.
        due = len(self._draft_times) >= self.window // 2
        return not (self._calibrate and due and not self._plain_times)

    def observe(self, drafted: int, tokens_per_row: float, seconds: float) -> str | None:
        """Record one round and return a note when the guard changes its mind, else None.

        Args:
            drafted: tokens drafted in this round, over all rows.
            tokens_per_row: tokens emitted per active row.
            seconds: duration of the round.
        """
        if drafted == 0:
            self._plain_times.append(seconds)
            if self._pause_left > 0:
                self._pause_left -= 1
            return None
        self._draft_times.append(seconds)
        self._draft_tokens.append(tokens_per_row)
        benefit = self.benefit
        if benefit is None or len(self._draft_times) < self.window or benefit >= 1.0:
            return None
        measured = f"speculation is slower than plain decoding here (benefit {benefit:.2f})"
        self._draft_times.clear()
        self._draft_tokens.clear()
        if not self.stops:
            return measured + "; drafting goes on because a seeded result must not depend on time"
        self.stopped += 1
        self._pause_left, self.pause = self.pause, self.pause * 2
        return measured + "; drafting stopped, with occasional probes"
