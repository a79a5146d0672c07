"""How much a call drafts, round by round: its schedule, with the benefit guard on top."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.call import Asks, DrafterCall
from specdec_hf.drafting.checks import IGNORED, describe
from specdec_hf.drafting.drafter import Cost, Draft, Drafter, drafts_trees
from specdec_hf.drafting.sampling import stats_of_draft
from specdec_hf.loop.statistics import RoundRecord, SpecStats
from specdec_hf.options import DEFAULT_NUM_ASSISTANT_TOKENS
from specdec_hf.rules import text_depends_on_drafts
from specdec_hf.runner.comparison import coarse_arithmetic
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.protocol import Lengths, to_device
from specdec_hf.schedules.base import (
    ConstantSchedule,
    Outcome,
    Schedule,
    ScheduleContext,
    TokenStats,
)
from specdec_hf.schedules.benefit_guard import BenefitGuard
from specdec_hf.schedules.costs import (
    SHARE_ON_DEVICE,
    Costs,
    ExpectedCosts,
    Measurements,
    recall,
    remember,
)
from specdec_hf.schedules.registry import check_takes, make_schedule


def costs_of(model: Any, rule: str, lengths: Lengths, *, exact: bool, by_clock: bool) -> Costs:
    """The costs that decide how much a call drafts.

    Where the text depends on how much is drafted, a clock decides only for callers who ask for it.
    Where that is so by the rule, the guard never waits by itself, and its notes may come from a
    clock. ``exact`` is `has_exact_text`, and ``by_clock`` whether the caller asks for a clock.
    """
    if exact or by_clock or text_depends_on_drafts(rule):
        return Costs()
    share = 1.0 if model.device.type == "cpu" else SHARE_ON_DEVICE
    return ExpectedCosts(len(lengths), share, int(lengths.max()))


def timing_notes(model: Any, rule: str, costs: Costs) -> list[str]:
    """A note where a clock decides how wide forwards are, and wider ones round otherwise.

    That texts of other forwards may differ says nothing of this text: who compares two texts says
    whether they differ, and why, and a call compares none.
    """
    dtype = coarse_arithmetic(model)
    if dtype is None or text_depends_on_drafts(rule) or not costs.measured:
        return []
    return [
        f"in {dtype} a forward of several tokens rounds unlike one of one token, and timing "
        "decides how many are drafted: at near ties the same call may give another text"
    ]


def draft_length(drafter: Drafter | None, number: int | None) -> int:
    """How many tokens a round drafts as the caller asks for them, or the depth of the trees."""
    if drafter is not None and drafter.size:
        return drafter.depth
    return DEFAULT_NUM_ASSISTANT_TOKENS if number is None else number


def schedule_for(drafter: Drafter | None, asked: str | Schedule | None, length: int) -> Schedule:
    """The schedule of a call, not yet started; ``length`` is `draft_length`.

    Raises:
        Refused: it does not fit the drafter.
    """
    schedule = make_schedule("constant" if asked is None else asked)
    if drafter is None or length == 0:
        schedule = ConstantSchedule()
    if drafter is not None:
        has_stats = drafter.draws or drafter.reports_confidence
        check_takes(drafter.name, schedule, trees=drafts_trees(drafter), has_stats=has_stats)
    return schedule


@dataclass(frozen=True, eq=False)
class Pace:
    """What decides how much a call drafts: a schedule that was started, and the costs it reads."""

    schedule: Schedule
    costs: Costs

    @classmethod
    def start(
        cls, schedule: Schedule, costs: Costs, batch_size: int, length: int, vocab_size: int,
        *, trees: bool,
    ) -> Self:  # fmt: skip
        """Start a schedule for a call."""
        schedule.start(ScheduleContext(batch_size, length, vocab_size, trees, costs))
        return cls(schedule, costs)


class DraftLengthPolicy:
    """The schedule and the guard of a call, whose costs begin with those of earlier calls.

    What is measured outlives the call only where the clock gives the real time.

    Args:
        padded: how wide a forward of so many tokens is, where forwards are padded.
    """

    def __init__(
        self,
        pace: Pace,
        guard: bool | BenefitGuard | None,
        drafter: Drafter | None,
        *,
        model: Any,
        rule: str,
        batch_size: int,
        stats: SpecStats,
        clock: Callable[[], float],
        padded: Callable[[int], int] | None = None,
    ) -> None:
        self.schedule, self.costs, self.drafter = pace.schedule, pace.costs, drafter
        if padded is not None:
            self.costs.padded = padded
        self.model, self.rule, self.stats = model, rule, stats
        self.batch_size = batch_size
        own = getattr(drafter, "model", None)  # a draft model is measured for itself
        self.drafts = own if isinstance(own, torch.nn.Module) else type(drafter)
        self.shape = (self.batch_size, stats.tree, stats.forwards, self.costs.padded(1))
        self.remembers = self.costs.measured and clock is time.perf_counter
        self.guard: BenefitGuard | None = None
        self.expected_benefit: float | None = None
        self._limits = np.zeros(batch_size, dtype=np.int64)
        self._asked = False
        self._held_back = self._in_vain = 0  # rounds
        if drafter is None:
            return
        if isinstance(guard, BenefitGuard):
            self.guard = copy.deepcopy(guard)
        elif guard is not False:
            # Under other rules a round without drafts emits other text, so that a pause, which
            # depends on time, changes the text.
            self.guard = BenefitGuard(stops=guard is True or not text_depends_on_drafts(rule))

    def asks(self) -> Asks:
        """What the schedule answers a state."""
        return Asks(
            self.continue_drafting if self.schedule.reads_token_stats else None,
            self.schedule.nodes if self.schedule.sizes_trees else None,
        )

    def begin(self, cost: Cost, expected_benefit: float | None, budget: int) -> None:
        """Learn what drafting costs and gives by the drafter's `State`; ``budget`` is in tokens."""
        costs, self.expected_benefit = self.costs, expected_benefit
        earlier = self._earlier_measurements()
        if costs.measured:
            costs.start_from(earlier.costs)
        costs.expect(cost.relative, cost.at_once, cost.reads_prompt)
        if self.guard is not None:
            self.guard.start(costs, budget, trusted=earlier.trusted)
        self._note_what_texts_depend_on()

    def _earlier_measurements(self) -> Measurements:
        earlier = Measurements()
        if self.remembers:
            earlier = recall(record_of(self.model).measured, self.drafts, self.shape)
        if earlier.benefit is None:
            earlier = replace(earlier, benefit=self.expected_benefit)
        return earlier

    def _note_what_texts_depend_on(self) -> None:
        if not text_depends_on_drafts(self.rule):
            return
        # One number of nodes serves all trees of a batch.
        sizes_trees = self.schedule.sizes_trees and drafts_trees(self.drafter)
        mixes = self.schedule.mixes_sequences or sizes_trees
        for depends, on in (
            (self.schedule.reads_clock, "timing, and the same seeds need not give it again"),
            (mixes and self.batch_size > 1, "the rest of the batch"),
        ):
            if depends:
                self.stats.note(
                    f"schedule {self.schedule.name!r} under rule {self.rule!r}: the text depends "
                    f"on {on}"
                )

    def limits(self, most: NDArray[np.int64]) -> NDArray[np.int64]:
        """[B], how many tokens each sequence may draft in the next round, ``most`` at most."""
        self._limits, self._asked = np.zeros_like(most), False
        if self.drafter is None or not most.any():
            return self._limits
        wanted = np.minimum(self.schedule.lengths(most), self.schedule.max_draft)
        self._limits = np.minimum(wanted, most)
        guard, number, longest = self.guard, self.stats.rounds, int(self._limits.max())
        if guard is not None and longest:
            affordable = guard.affordable(number, longest)
            if affordable < longest and guard.stops and text_depends_on_drafts(self.rule):
                self.stats.note(
                    f"drafting waits for the clock under rule {self.rule!r}: the text depends on "
                    "timing, and the same seeds need not give it again"
                )
            self._limits = np.minimum(self._limits, affordable)
            self._held_back += affordable == 0
        return self._limits

    def continue_drafting(self, number: int, token_stats: TokenStats) -> NDArray[np.bool_]:
        """`Asks.continue_drafting`."""
        self._asked = True
        self.stats.device_reads += 1
        return self.schedule.continue_drafting(number, token_stats) & (number + 1 < self._limits)

    def kept(self, draft: Draft, call: DrafterCall) -> NDArray[np.int64]:
        """[B], how many tokens of a checked draft are verified."""
        assert draft.counts is not None
        assert self.drafter is not None
        counts = draft.counts
        if self._asked or not self.schedule.reads_token_stats:
            return counts
        absent = np.arange(draft.tokens.shape[1]) >= draft.counts[:, None]
        if draft.drawn is not None:
            self.stats.device_reads += 1
            masked = to_device(absent, draft.tokens.device)
            tokens = draft.tokens.masked_fill(masked, -1)
            temperature = call.sampling_on(draft.drawn.logits.device)["temperature"]
            token_stats = stats_of_draft(tokens, draft.drawn, temperature)
        elif draft.confidence is not None:
            confidence = np.where(absent, np.float32(np.nan), draft.confidence)
            token_stats = [TokenStats.of_confidence(column) for column in confidence.T]
        else:
            call.note(
                f"{describe(self.drafter)} gave neither a distribution nor a confidence; schedule "
                f"{self.schedule.name!r} takes the whole draft"
            )
            return counts
        drawn = draft.drawn is not None
        return np.minimum(self.schedule.cut(token_stats, counts, drawn=drawn), counts)

    def learn(
        self,
        record: RoundRecord,
        outcome: Outcome,
        width: int,
        *,
        prompt: int | None,
        recorded: bool = False,
    ) -> dict[str, Any]:
        """Learn from a round; returns what the schedule records of it.

        Args:
            record: its counts and times so far.
            outcome: of its drafts.
            width: drafted tokens that the target's forward read for each sequence.
            prompt: tokens of the prompt that the forward read for each sequence, 0 where a prefill
                of the model's own had read them; None in all rounds after the first.
            recorded: whether CUDA graphs were recorded in the round, whose times then say nothing.
        """
        if self.drafter is None:
            return {}
        rest = record.target + record.after_target
        if prompt is not None:
            self.costs.observe_prompt(prompt, rest)
            return {}
        self._in_vain += bool(self._limits.any()) and width == 0
        depth, seconds, in_vain = int(outcome.drafted.max()), record.seconds, record.draft
        written = self.schedule.record()
        unknown = recorded and self.costs.measured
        if not unknown:
            self.costs.observe(depth, width, record.draft, rest)
        self.schedule.observe(outcome)
        if self.guard is None or unknown:
            return written
        if isinstance(self.costs, ExpectedCosts):
            seconds, in_vain = self.costs.seconds(depth, width), 0.0
        emitted = [n for n in record.emitted if n]
        tokens = sum(emitted) / max(len(emitted), 1)
        note = self.guard.observe(width, tokens, seconds, in_vain)
        if note is not None:
            self.stats.notes.append(f"round {self.stats.rounds + 1}: {note}")
        return written

    def finish(self) -> None:
        """Report what was measured, and keep it for the next call."""
        if self.drafter is None:
            return
        if self.guard is not None:
            self.stats.benefit = self.guard.benefit
            if self.costs.measured:
                self.stats.plain_step_seconds = self.guard.plain_step
        if not self.stats.drafted:
            self._note_why_nothing_was_drafted()
        self.remember()

    def remember(self) -> None:
        """Keep what was measured for the next policy of as many sequences."""
        if self.drafter is not None and self.remembers:
            benefit = None if self.guard is None else self.guard.benefit
            measured, expected = record_of(self.model).measured, self.expected_benefit
            remember(measured, self.drafts, self.shape, self.costs, benefit, expected)

    def _note_why_nothing_was_drafted(self) -> None:
        rounds = self.stats.rounds
        if self._held_back:
            self.stats.note(
                f"nothing was drafted: the benefit guard held drafting back in {self._held_back} "
                f"of {rounds} rounds, until plain decoding has paid for a draft that is rejected; "
                "guard=False drafts from the second round"
            )
        refused = any(IGNORED in note for note in self.stats.notes)
        if self._in_vain and not refused:  # else a note says already what was found
            self.stats.note(
                f"nothing was drafted: no draft was found in {self._in_vain} of {rounds} rounds"
            )
