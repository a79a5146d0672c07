"""SpecDec++: a draft ends when a rejection has become likely.

Source: Huang et al. 2024, arXiv 2405.19715, section 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec_hf.arguments import check_number
from specdec_hf.schedules.base import (
    Flags,
    Lengths,
    Outcome,
    Schedule,
    ScheduleContext,
    TokenStats,
)

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
        return np.minimum(self.context.num_assistant_tokens, most)

    def goes_on(self, number: int, stats: TokenStats) -> Flags:
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
