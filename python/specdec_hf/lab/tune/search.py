"""Which candidate drafts fastest: successive halving, and a choice that noise does not make.

Successive halving (Karnin et al. 2013; Jamieson and Talwalkar 2016) lets all candidates answer a
few prompts, the better half about twice as many, and so on. The largest of many measured speeds is
most often one that noise made large. Therefore no candidate counts as faster than its tokens a
round, which no clock measures: a round costs at least a forward of one token. The finalists are
measured anew, with answers that chose none of them, and the one whose speed is least in doubt is
taken: that with the largest lower end of its interval. Where no such end is above 1, plain decoding
is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec_hf.drafting.registry import AUTO
from specdec_hf.lab.bench.runs import Turns
from specdec_hf.lab.bench.summary import interval_of, ratio_of, sums_of
from specdec_hf.lab.tune.candidates import MIN_BATCHES, Candidate, schedules_of, shapes_of

# Each stage with the share of the time that is left when it begins.
STAGES = {"drafters": 0.4, "lengths and trees": 0.33, "schedules": 0.33, "finalists": 1.0}
KEPT = {"drafters": 2, "lengths and trees": 2, "schedules": 3}
MAX_FINALISTS = 4
MIN_RATIO = 1.0  # the lower end of an interval that pays


@dataclass
class Trial:
    """What was measured of a candidate in one stage.

    Attributes:
        pairs: by the number of the batch, its answers and the plain ones made in turns with them.
    """

    candidate: Candidate
    pairs: dict[int, list[Turns]] = field(default_factory=dict)

    def add(self, number: int, pair: Turns) -> None:
        """Add an answer to batch ``number``."""
        self.pairs.setdefault(number, []).append(pair)

    @property
    def sums(self) -> NDArray[np.float64]:
        """[n, 4], as in `sums_of`, for each of n batches the mean of its answers."""
        return np.array([sums_of(pairs).mean(axis=0) for pairs in self.pairs.values()])

    @property
    def ratio(self) -> float:
        """Tokens a second over those of plain decoding."""
        return ratio_of(self.sums)

    @property
    def interval(self) -> tuple[float, float] | None:
        """90 % of the ratio, as `bench` has it; None for one batch."""
        return interval_of(self.sums)

    @property
    def speed(self) -> float:
        """The ratio, but for the part that only noise can explain."""
        return min(self.ratio, self.tokens_per_round)

    @property
    def low(self) -> float:
        """The lower end of the interval, with the same bound; 0 without an interval."""
        return 0.0 if self.interval is None else min(self.interval[0], self.tokens_per_round)

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all seconds."""
        tokens, seconds, _, _ = self.sums.sum(axis=0)
        return float(tokens / seconds)

    @property
    def every(self) -> list[Turns]:
        """The pairs of all batches."""
        return [pair for pairs in self.pairs.values() for pair in pairs]

    @property
    def tokens_per_round(self) -> float:
        """Tokens per forward of the target and sequence; 0 where no round was counted."""
        rounds = sum(pair.mine.rounds for pair in self.every)
        return sum(pair.mine.tokens for pair in self.every) / rounds if rounds else 0.0

    @property
    def identical(self) -> int:
        """How many answers have the text of plain decoding."""
        return sum(pair.mine.identical for pair in self.every)


class Measurement(Protocol):
    """Who answers prompts with candidates."""

    def ready(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that can take part, each warm."""

    def answer(self, trials: Sequence[Trial]) -> None:
        """Answer the next batch with all of them, in turns, and add the pairs."""


@dataclass
class Found:
    """The result of `search`.

    Attributes:
        stages: the trials of each stage that measured something, the best first.
        chosen: the trial of the finalist to take; None is plain decoding.
    """

    stages: dict[str, list[Trial]]
    chosen: Trial | None


def search(
    first: Sequence[Candidate],
    measurement: Measurement,
    seconds: float,
    clock: Callable[[], float],
    *,
    exact: bool,
    on_stage: Callable[[str, list[Trial]], None] = lambda stage, trials: None,
) -> Found:
    """Measure drafters, then lengths, trees and schedules of the best, then the best of all anew.

    Args:
        first: the candidates of the first stage.
        measurement: answers prompts.
        seconds: all that it may take. Stages for which there is no time are left out, but for the
            first and the last, which may take more.
        clock: gives seconds.
        exact: whether answers must have the text of plain decoding to be taken.
        on_stage: called after each stage.
    """
    start = clock()
    end = start + seconds
    stages: dict[str, list[Trial]] = {}
    first = measurement.ready(first)
    auto = [one for one in first if one.settings.drafter == [AUTO]]
    pace = (clock() - start) / max(1, len(first))  # seconds of an answer and the plain one

    def stage(name: str, candidates: Sequence[Candidate]) -> list[Candidate]:
        nonlocal pace
        taken, kept = measurement.ready(candidates), KEPT[name]
        if len(taken) <= kept:  # nothing is to be left out
            return taken
        began, share = clock(), STAGES[name] * (end - clock())
        trials = halve(list(map(Trial, taken)), measurement.answer, share, kept, clock)
        pace = (clock() - began) / sum(len(trial.every) for trial in trials)
        stages[name] = trials
        on_stage(name, trials)
        return [trial.candidate for trial in trials[:kept]]

    def is_time_for(candidates: Sequence[Candidate]) -> bool:
        """Whether these can begin to be halved, and the finalists be measured after them."""
        answers = 3 * len(candidates) + MIN_BATCHES * MAX_FINALISTS
        return answers * pace <= end - clock()

    best = stage("drafters", first)
    for name, variants in (("lengths and trees", shapes_of), ("schedules", schedules_of)):
        wider = [variant for one in best for variant in variants(one)]
        if is_time_for(wider):
            best = stage(name, wider)
    # The default call is always among them, so that all learn what they have without a profile.
    names = {one.name for one in best}
    best += [one for one in auto if one.name not in names]
    if not best:
        return Found(stages, None)
    finalists = list(map(Trial, best))
    repeat(finalists, measurement.answer, end - clock(), MIN_BATCHES, clock)
    stages["finalists"] = ranked(finalists)
    on_stage("finalists", stages["finalists"])
    return Found(stages, choose(finalists, exact=exact))


def halve(
    trials: Sequence[Trial],
    answer: Callable[[Sequence[Trial]], None],
    seconds: float,
    kept: int,
    clock: Callable[[], float],
) -> list[Trial]:
    """All trials, the best first, after successive halving down to ``kept`` of them.

    Each rung has an equal share of the time, in which half as many answer about twice as often. A
    trial that is left out ranks below all that are not.
    """
    alive, out = list(trials), list[Trial]()
    rungs = max(1, math.ceil(math.log2(len(alive) / kept)))
    began = clock()
    for rung in range(rungs):
        repeat(alive, answer, began + seconds * (rung + 1) / rungs - clock(), 1, clock)
        alive = ranked(alive)
        remain = kept if rung == rungs - 1 else max(kept, math.ceil(len(alive) / 2))
        alive, out = alive[:remain], alive[remain:] + out
    return alive + out


def repeat(
    trials: Sequence[Trial],
    answer: Callable[[Sequence[Trial]], None],
    seconds: float,
    minimum: int,
    clock: Callable[[], float],
) -> None:
    """Answer batches while there is time for another, and at least ``minimum`` of them."""
    end, count = clock() + seconds, 0
    while True:
        began = clock()
        answer(trials)
        count += 1
        now = clock()
        if count >= minimum and now + (now - began) > end:
            return


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The trials by their speeds, the fastest first."""
    return sorted(trials, key=lambda trial: trial.speed, reverse=True)


def choose(finalists: Sequence[Trial], *, exact: bool) -> Trial | None:
    """The trial with the largest lower end; None where plain decoding may be as fast as each."""
    fit = [
        trial for trial in finalists
        if trial.low > MIN_RATIO and (not exact or trial.identical == len(trial.every))
    ]  # fmt: skip
    return max(fit, key=lambda trial: trial.low, default=None)
