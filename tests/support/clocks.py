"""Time that tests make up: a clock that counts calls, and a drafter that takes some of it."""

from __future__ import annotations

from specdec_hf import PromptLookupDrafter


class Clock:
    """Advances by so many seconds a call, and by what a drafter adds to ``now``."""

    def __init__(self, step=1.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


class SlowLookup(PromptLookupDrafter):
    """Prompt lookup that takes some seconds of a clock for every draft."""

    def __init__(self, clock, seconds):
        super().__init__(3, 1)
        self.clock, self.seconds = clock, seconds

    def timed(self, found):
        self.clock.now += 0.0 if found is None else self.seconds
        return found

    def propose(self, history, limits):
        return self.timed(super().propose(history, limits))
