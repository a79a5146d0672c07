"""When to stop drafting: speculation that is slower than plain decoding is switched off."""

from __future__ import annotations

from collections import deque
from numbers import Integral
from statistics import median


class BenefitGuard:
    """Measures the benefit of speculation as it runs, and pauses drafting while it is below 1.

    benefit = tokens per sequence and drafting round * seconds of a plain round / seconds of a
    drafting round. Each pause lasts twice as many plain rounds as the one before, and then a few
    drafting rounds measure again. All times come from the loop's clock, so tests can make them up.

    Under rules that read the draft distribution, a round without drafts emits other text than one
    with drafts. There the guard must not pause by the clock (``stops=False``), and the one plain
    round that it needs for comparison is always the same one.

    Args:
        window: number of drafting rounds that are measured before a decision.
        pause: number of plain rounds in the first pause.
        stops: False measures and reports but never pauses.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: a number below 1.
    """

    def __init__(self, *, window: int = 8, pause: int = 16, stops: bool = True) -> None:
        for name, value in (("window", window), ("pause", pause)):
            message = f"{name} must be an integer of at least 1, got {value!r}"
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(message)
            if value < 1:
                raise ValueError(message)
        if not isinstance(stops, bool):
            raise TypeError(f"stops must be True or False, got {stops!r}")
        self.window = int(window)
        self.pause = int(pause)
        self.stops = stops
        self.stopped = 0
        self._plain_times: deque[float] = deque(maxlen=self.window)
        self._draft_times: deque[float] = deque(maxlen=self.window)
        self._draft_tokens: deque[float] = deque(maxlen=self.window)
        self._rounds_to_pause = 0

    @property
    def plain_step(self) -> float | None:
        """Median seconds of a plain round, None before one was seen."""
        return median(self._plain_times) if self._plain_times else None

    @property
    def benefit(self) -> float | None:
        """Benefit over the last drafting rounds, None before both kinds of rounds were seen."""
        plain = self.plain_step
        if plain is None or not self._draft_times:
            return None
        tokens = sum(self._draft_tokens) / len(self._draft_tokens)
        return tokens * plain / max(median(self._draft_times), 1e-12)

    @property
    def pausing(self) -> bool:
        """Whether the next round belongs to a pause."""
        return self._rounds_to_pause > 0

    def allows_drafting(self, number: int) -> bool:
        """Whether the next round of a call, its ``number``-th from 0, should draft."""
        if not self.stops:
            # Neither times nor the other sequences of the batch may decide here.
            return number != self.window // 2 + 1
        if self.pausing:
            return False
        # The comparison needs one plain round. It costs time, so it waits until half a window of
        # drafting rounds has been seen: short texts never pay for it.
        compares_soon = len(self._draft_times) >= self.window // 2
        return not (compares_soon and not self._plain_times)

    def observe(self, drafted: int, tokens_per_sequence: float, seconds: float) -> str | None:
        """Record one round.

        Args:
            drafted: tokens drafted for each sequence in this round.
            tokens_per_sequence: tokens emitted per active sequence.
            seconds: duration of the round.

        Returns:
            A note for the user when the benefit was found to be below 1, else None.
        """
        if drafted == 0:
            self._plain_times.append(seconds)
            if self._rounds_to_pause > 0:
                self._rounds_to_pause -= 1
            return None
        self._draft_times.append(seconds)
        self._draft_tokens.append(tokens_per_sequence)
        benefit = self.benefit
        if benefit is None or len(self._draft_times) < self.window or benefit >= 1.0:
            return None
        measured = f"speculation is slower than plain decoding here (benefit {benefit:.2f})"
        self._draft_times.clear()
        self._draft_tokens.clear()
        if not self.stops:
            return measured + "; drafting goes on because the text must not depend on time"
        self.stopped += 1
        self._rounds_to_pause, self.pause = self.pause, self.pause * 2
        return measured + "; drafting stopped, with occasional probes"
