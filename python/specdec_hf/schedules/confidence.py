"""Drafts that end after a token of low probability."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer, check_number
from specdec_hf.schedules.base import (
    DEFAULT_THRESHOLD,
    ConstantSchedule,
    Flags,
    Lengths,
    Outcome,
    Schedule,
    ScheduleContext,
    TokenStats,
)
from specdec_hf.schedules.registry import make_schedule


class ConfidenceSchedule(Schedule):
    """Ends a draft after a token whose probability is below a threshold.

    It is ``assistant_confidence_threshold`` of Transformers. llama.cpp's ``--draft-p-min`` drops
    the token itself, which is right for greedy text only.

    Args:
        threshold: in [0, 1]; 0 never ends a draft.
        inner: the schedule of the longest draft; constant by default.

    Raises:
        TypeError: a threshold that is not a number.
        ValueError: a threshold outside [0, 1].
    """

    name = "confidence"
    reads_token_stats = True

    def __init__(self, threshold: float = DEFAULT_THRESHOLD, inner: Schedule | None = None) -> None:
        self.threshold = check_number("threshold", threshold, 0, 1)
        self.inner = ConstantSchedule() if inner is None else inner
        self.reads_clock = self.inner.reads_clock
        self.mixes_sequences = self.inner.mixes_sequences

    def start(self, context: ScheduleContext) -> None:
        super().start(context)
        self.inner.start(context)
        self.max_draft = self.inner.max_draft

    def lengths(self, most: Lengths) -> Lengths:
        return self.inner.lengths(most)

    def continue_drafting(self, number: int, stats: TokenStats) -> Flags:
        return stats.probability >= self.threshold

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(outcome)

    def record(self) -> dict[str, Any]:
        return self.inner.record()


def with_threshold(schedule: str | Schedule, threshold: float) -> ConfidenceSchedule:
    """A schedule that also stops at ``assistant_confidence_threshold`` of Transformers.

    Raises:
        ValueError: a schedule that reads token statistics itself.
    """
    inner = make_schedule(schedule)
    if inner.reads_token_stats:
        raise ValueError(
            "assistant_confidence_threshold and num_assistant_tokens_schedule="
            f"{inner.name!r} must not both be given"
        )
    return ConfidenceSchedule(threshold, inner)


class DraftExitSchedule(Schedule):
    """Ends a draft after a token of low probability; the threshold follows the acceptance rate.

    After each round of a sequence that drafted, with the share AR_e of its drafts that were
    accepted and the threshold t::

        AR = beta1 * AR + (1 - beta1) * AR_e
        t  = beta2 * t + (1 - beta2) * (t + step if AR <= alpha else t - step)

    So it drafts more where more is accepted than ``alpha``, and less where less is. Each sequence
    has a threshold of its own, which stays in [0, 1]. AR begins as the first round's share. No
    clock is read.

    Args:
        alpha: the acceptance rate to keep, in [0, 1].
        threshold: the first one, in [0, 1].
        beta1, beta2: in [0, 1], how slowly the rate and the threshold follow.
        step: at least 0.

    Raises:
        TypeError: an argument that is not a number.
        ValueError: an argument out of range.

    Source: Zhang et al. 2023, "Draft & Verify", arXiv 2309.08168, the adaptive draft-exiting
    mechanism, whose alpha, beta1, beta2 and step (epsilon) are the defaults.
    """

    name = "draft_exit"
    reads_token_stats = True

    def __init__(
        self,
        alpha: float = 0.9,
        threshold: float = 0.8,
        beta1: float = 0.5,
        beta2: float = 0.9,
        step: float = 0.01,
    ) -> None:
        self.alpha = check_number("alpha", alpha, 0, 1)
        self.threshold = check_number("threshold", threshold, 0, 1)
        self.beta1 = check_number("beta1", beta1, 0, 1)
        self.beta2 = check_number("beta2", beta2, 0, 1)
        self.step = check_number("step", step, 0)

    def start(self, context: ScheduleContext) -> None:
        super().start(context)
        self.thresholds = np.full(context.batch_size, self.threshold)
        self._rates = np.full(context.batch_size, np.nan)

    def lengths(self, most: Lengths) -> Lengths:
        return np.full_like(most, self.context.num_assistant_tokens)

    def continue_drafting(self, number: int, stats: TokenStats) -> Flags:
        return stats.probability >= self.thresholds

    def observe(self, outcome: Outcome) -> None:
        drafted = outcome.drafted > 0
        share = outcome.accepted / np.maximum(outcome.drafted, 1)
        begun = np.where(np.isnan(self._rates), share, self._rates)
        rates = self.beta1 * begun + (1 - self.beta1) * share
        moved = self.thresholds + np.where(rates <= self.alpha, self.step, -self.step)
        mixed = self.beta2 * self.thresholds + (1 - self.beta2) * moved
        self._rates = np.where(drafted, rates, self._rates)
        self.thresholds = np.where(drafted, mixed.clip(0, 1), self.thresholds)

    def record(self) -> dict[str, Any]:
        return {"threshold": self.thresholds.tolist()}


class TunedConfidenceSchedule(Schedule):
    """Ends a draft after a token of low probability, with a threshold that is tuned as it runs.

    The first ``explore`` rounds of a sequence, and then every ``explore``-th, draft without a
    threshold. Each of them tells for every threshold how many tokens it would have drafted, d, and
    emitted, e. The threshold for the other rounds maximises ``sum(e) / sum(1 + draft_cost * d)``
    over the last 32 of them. No clock is read, so that seeds repeat the text. Transformers tunes
    its threshold by an ROC curve over all drafted tokens, which leaves their cost out.

    Args:
        draft_cost: cost of a drafted token and its verification in forwards of the target.
        explore: rounds, at least 1.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an argument out of range.

    Source: none; defined here.
    """

    name = "confidence_tuned"
    reads_token_stats = True
    GRID = np.linspace(0.0, 0.95, 20)

    def __init__(self, draft_cost: float = 0.1, explore: int = 8) -> None:
        self.draft_cost = check_number("draft_cost", draft_cost, 0)
        self.explore = check_integer("explore", explore, 1)

    def start(self, context: ScheduleContext) -> None:
        super().start(context)
        size = context.batch_size
        self.thresholds = np.zeros(size)
        self._rounds = np.zeros(size, dtype=np.int64)
        # [thresholds] each: tokens and cost of an exploring round under every threshold.
        self._seen: list[deque[tuple[NDArray[np.float64], NDArray[np.float64]]]] = [
            deque(maxlen=32) for _ in range(size)
        ]
        self._begin_round()

    def _begin_round(self) -> None:
        explores = (self._rounds < self.explore) | (self._rounds % self.explore == 0)
        self._now = np.where(explores, 0.0, self.thresholds)
        self._probabilities: list[NDArray[np.float32]] = []

    def lengths(self, most: Lengths) -> Lengths:
        self._begin_round()
        return np.full_like(most, self.context.num_assistant_tokens)

    def continue_drafting(self, number: int, stats: TokenStats) -> Flags:
        self._probabilities.append(stats.probability)
        return stats.probability >= self._now

    def observe(self, outcome: Outcome) -> None:
        if not self._probabilities:
            return  # a draft without a distribution tells nothing of thresholds
        for b in np.flatnonzero(outcome.drafted).tolist():
            self._rounds[b] += 1
            if self._now[b] > 0:
                continue
            drafted = int(outcome.drafted[b])
            below = np.array([float(row[b]) for row in self._probabilities[:drafted]])
            ends = below < self.GRID[:, None]
            # The token that ends a draft is part of it.
            lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, drafted)
            emitted = np.minimum(lengths, outcome.accepted[b]) + 1.0
            self._seen[b].append((emitted, 1 + self.draft_cost * lengths))
            tokens, costs = (np.sum(column, axis=0) for column in zip(*self._seen[b], strict=True))
            self.thresholds[b] = self.GRID[np.argmax(tokens / costs)]

    def record(self) -> dict[str, Any]:
        return {"threshold": self._now.tolist()}


BINS = 10
PRIOR_WEIGHT = 4.0


class SpecDecPlusPlusSchedule(Schedule):
    """Ends a draft when ``1 - a_1 * ... * a_j > h``, a_j the predicted probability of acceptance.

    The paper trains a head that predicts a_j. Here a_j is the drafter's probability of the token,
    calibrated as the text goes on: among verified tokens whose probability lies in the same tenth,
    the share of accepted ones, with the probability itself as a prior of four tokens. Each sequence
    has a calibration of its own.

    Args:
        h: in [0, 1]; the paper uses 0.7.

    Raises:
        TypeError: not a number.
        ValueError: h outside [0, 1].
    """

    name = "specdec++"
    reads_token_stats = True

    def __init__(self, h: float = 0.7) -> None:
        self.h = check_number("h", h, 0, 1)

    def start(self, context: ScheduleContext) -> None:
        super().start(context)
        self._verified = np.zeros((context.batch_size, BINS))
        self._accepted = np.zeros((context.batch_size, BINS))
        self._begin_round()

    def _begin_round(self) -> None:
        self._all_accepted = np.ones(self.context.batch_size)
        self._on = np.ones(self.context.batch_size, dtype=bool)
        self._bins: list[Lengths] = []

    def lengths(self, most: Lengths) -> Lengths:
        self._begin_round()
        return np.full_like(most, self.context.num_assistant_tokens)

    def continue_drafting(self, number: int, stats: TokenStats) -> Flags:
        self._on &= ~np.isnan(stats.probability)
        probability = np.nan_to_num(stats.probability.astype(np.float64))
        bins = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
        self._bins.append(bins)
        rows = np.arange(len(bins))
        accepted = self._accepted[rows, bins] + PRIOR_WEIGHT * probability
        accepted /= self._verified[rows, bins] + PRIOR_WEIGHT
        self._all_accepted = np.where(self._on, self._all_accepted * accepted, self._all_accepted)
        self._on &= 1 - self._all_accepted <= self.h
        return self._on.copy()

    def observe(self, outcome: Outcome) -> None:
        for b in np.flatnonzero(outcome.drafted).tolist():
            # Drafts after a rejected one are not compared with anything.
            for i in range(min(int(outcome.accepted[b] + outcome.rejected[b]), len(self._bins))):
                self._verified[b, self._bins[i][b]] += 1
                self._accepted[b, self._bins[i][b]] += i < outcome.accepted[b]

    def record(self) -> dict[str, Any]:
        return {"all_accepted": self._all_accepted.tolist()}
