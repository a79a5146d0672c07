"""Which candidate drafts fastest: successive halving, and a choice that noise does not make.

Successive halving (Karnin et al. 2013; Jamieson and Talwalkar 2016) lets all candidates answer a
few prompts, the better half about twice as many, and so on. The largest of many measured speeds is
most often one that noise made large. Therefore no candidate counts as faster than its tokens a
round, which no clock measures: a round costs at least a forward of one token. The finalists are
measured anew, with answers that chose none of them, and the one whose speed is least in doubt is
taken: that with the largest lower end of its interval. Where no such end is above 1, none is.

All are compared with this library without drafts, so that a ratio is what speculation adds. A
search that ends early, by its time or by Ctrl-C, takes its choice from the last stage in which
enough prompts were answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from specdec_hf.cli import interrupt
from specdec_hf.cli.speeds import Speeds
from specdec_hf.drafting.registry import AUTO

from specdec_lab.bench.runs import Turns
from specdec_lab.bench.summary import interval_of, ratio_of, speeds_of, sums_of
from specdec_lab.tune.candidates import MIN_BATCHES, Candidate, schedules_of, shapes_of

# Each stage with the share of the time that is left when it begins.
STAGES = {"drafters": 0.4, "lengths and trees": 0.33, "schedules": 0.33, "finalists": 1.0}
KEPT = {"drafters": 2, "lengths and trees": 2, "schedules": 3}
MAX_FINALISTS = 4
MIN_RATIO = 1.0  # the lower end of an interval that pays
# Prompts that model.generate answers, and the share of the time after which none follows.
GENERATED, GENERATED_SHARE = 3, 0.05
OUT_OF_TIME, INTERRUPTED = "out of time", "interrupted"


class OutOfTimeError(Exception):
    """No answer is begun any more, because the time of the search is over."""


@dataclass
class Trial:
    """What was measured of a candidate in one stage.

    Attributes:
        turns: by the number of the batch, its answers and those without drafts made in turns with
            them.
    """

    candidate: Candidate
    turns: dict[int, list[Turns]] = field(default_factory=dict)

    def add(self, number: int, turns: Turns) -> None:
        """Add an answer to batch ``number``."""
        self.turns.setdefault(number, []).append(turns)

    @property
    def sums(self) -> NDArray[np.float64]:
        """[n, 4], as in `sums_of`, for each of n batches the mean of its answers."""
        return np.array(
            [sums_of(turns, "without_drafts").mean(axis=0) for turns in self.turns.values()]
        )

    @property
    def ratio(self) -> float:
        """Tokens a second over those without drafts."""
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

    def speeds(self, library: float | None = None) -> Speeds:
        """The speeds of its answers; ``library`` is the ratio without drafts that was measured."""
        tokens, seconds, other_tokens, other_seconds = self.sums.sum(axis=0).tolist()
        return Speeds.of_sums(
            [(other_tokens, other_seconds * library) if library else None],
            [(other_tokens, other_seconds)],
            [(tokens, seconds)],
            drafted=sum(one.mine.drafted for one in self.every),
            accepted=sum(one.mine.accepted for one in self.every),
        )

    @property
    def every(self) -> list[Turns]:
        """The turns of all batches."""
        return [one for turns in self.turns.values() for one in turns]

    @property
    def tokens_per_round(self) -> float:
        """Tokens per forward of the target and sequence; 0 where no round was counted."""
        rounds = sum(one.mine.rounds for one in self.every)
        return sum(one.mine.tokens for one in self.every) / rounds if rounds else 0.0

    @property
    def identical(self) -> int:
        """How many answers have the text that the library gives without drafts."""
        return sum(one.mine.identical for one in self.every)


class TrialRunner(Protocol):
    """Who answers prompts with candidates.

    Each method raises `OutOfTimeError` before an answer for which it is too late.
    """

    def compare(self, number: int) -> Turns:
        """Answers of this library without drafts and of ``model.generate`` to batch ``number``."""

    def ready(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that can take part, each warm."""

    def answer(self, trials: Sequence[Trial]) -> None:
        """Answer the next batch with all of them, and add the turns."""


@dataclass
class TuneResult:
    """The result of `search`.

    Attributes:
        stages: the trials of each stage that measured something, the best first.
        chosen: the trial of the finalist to take; None is no drafts.
        generated: answers without drafts and those of ``model.generate`` in turns with them.
        ended: why it ended before the finalists had answered enough prompts; "" if it did not.
    """

    stages: dict[str, list[Trial]] = field(default_factory=dict)
    chosen: Trial | None = None
    generated: list[Turns] = field(default_factory=list)
    ended: str = ""

    @property
    def library(self) -> float | None:
        """Speed without drafts over that of ``model.generate``, on the prompts it answered."""
        return speeds_of(self.generated).together if self.generated else None

    @property
    def prompts_generated(self) -> int:
        """How many prompts ``model.generate`` answered."""
        return sum(len(turns.mine.prompts) for turns in self.generated)

    @property
    def measured(self) -> list[Trial]:
        """The trials of the last stage in which some answered `MIN_BATCHES`, those that did."""
        for trials in reversed(self.stages.values()):
            enough = [trial for trial in trials if len(trial.turns) >= MIN_BATCHES]
            if enough:
                return enough
        return []

    @property
    def best(self) -> Trial | None:
        """The fastest of `measured`, or else of the last stage that measured any; sure or not."""
        stages = (self.measured, *reversed(self.stages.values()))
        return next((trials[0] for trials in stages if trials), None)

    @property
    def tells(self) -> bool:
        """Whether it says what to take; not where it ended before what looks faster was sure to."""
        if not self.ended or self.chosen is not None:
            return True
        return bool(self.measured) and self.best is not None and self.best.speed <= 1


def search(
    first: Sequence[Candidate],
    runner: TrialRunner,
    seconds: float,
    clock: Callable[[], float],
    *,
    exact: bool,
    on_stage: Callable[[str, list[Trial]], None] = lambda stage, trials: None,
) -> TuneResult:
    """Measure drafters, then lengths, trees and schedules of the best, then the best of all anew.

    Args:
        first: the candidates of the first stage.
        runner: answers prompts, and ends the search with `OutOfTimeError`.
        seconds: all that it may take. Stages for which there is no time are left out, and so are
            finalists.
        clock: gives seconds.
        exact: whether answers must have the text of plain decoding to be taken.
        on_stage: called after each stage.
    """
    found, told = TuneResult(), set[str]()

    def tell(stage: str, trials: list[Trial]) -> None:
        on_stage(stage, trials)
        told.add(stage)

    try:
        _stages(found, first, runner, seconds, clock, tell)
    except OutOfTimeError:
        found.ended = OUT_OF_TIME
    except BaseException as error:
        if not interrupt.is_interruption(error):
            raise
        interrupt.forget()
        found.ended = INTERRUPTED
    for name in found.stages.keys() - told:  # the one in which it ended early
        begun = found.stages.pop(name)
        trials = ranked([trial for trial in begun if trial.turns])
        if trials:
            found.stages[name] = trials
            on_stage(name, trials)
        # Time mostly ends in the last pass, once all finalists have answered enough prompts.
        enough = all(len(trial.turns) >= MIN_BATCHES for trial in begun)
        if found.ended == OUT_OF_TIME and name == "finalists" and enough:
            found.ended = ""
    found.chosen = choose(found.measured, exact=exact)
    return found


def _stages(
    found: TuneResult,
    first: Sequence[Candidate],
    runner: TrialRunner,
    seconds: float,
    clock: Callable[[], float],
    on_stage: Callable[[str, list[Trial]], None],
) -> None:
    """Add all stages to ``found``."""
    start = clock()
    end = start + seconds
    for number in range(GENERATED):
        found.generated.append(runner.compare(number))
        if clock() - start > GENERATED_SHARE * seconds:
            break
    began = clock()
    first = runner.ready(first)
    auto = [one for one in first if one.settings.drafter == [AUTO]]
    pace = (clock() - began) / max(1, len(first))  # seconds of an answer and that without drafts

    def stage(name: str, candidates: Sequence[Candidate]) -> list[Candidate]:
        nonlocal pace
        taken, kept = runner.ready(candidates), KEPT[name]
        if len(taken) <= kept:  # nothing is to be left out
            return taken
        began, share = clock(), STAGES[name] * (end - clock())
        found.stages[name] = trials = list(map(Trial, taken))
        trials = halve(trials, runner.answer, share, kept, clock)
        pace = (clock() - began) / sum(len(trial.every) for trial in trials)
        found.stages[name] = trials
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
    # The default call comes next, so that all learn what they have by default.
    names = {one.name for one in best}
    best[1:1] = [one for one in auto if one.name not in names]
    if not best:
        return
    number = int((end - clock()) / max(pace * MIN_BATCHES, 1e-9))  # for which there is time
    found.stages["finalists"] = finalists = list(map(Trial, best[: max(1, number)]))
    repeat(finalists, runner.answer, end - clock(), MIN_BATCHES, clock)
    found.stages["finalists"] = ranked(finalists)
    on_stage("finalists", found.stages["finalists"])


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
        if rung and clock() >= began + seconds:  # what is left belongs to later stages
            break
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
