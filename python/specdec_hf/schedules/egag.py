"""EGAG: the entropy of the drafter's next distribution sets gamma."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer, check_number
from specdec_hf.schedules.base import (
    MAX_DRAFT_LENGTH,
    Flags,
    Lengths,
    Schedule,
    ScheduleContext,
    TokenStats,
    check_length,
)


class EgagSchedule(Schedule):
    """Entropy-guided adaptive gamma: the less certain the drafter, the shorter the draft.

    H is the entropy of the distribution that the first token of the round is drawn from. With
    ``H_norm = H / log(V)`` and its moving average ``m = beta * m + (1 - beta) * H_norm``,
    ``gamma = round(gamma_max - (gamma_max - gamma_min) * m)``, cut to the tokens that may still be
    generated. A drafter that only reports a confidence has 1 - confidence in the place of H_norm.
    ``h_norm`` and ``gamma`` of each round are in `RoundRecord.schedule`, null where nothing was
    drawn.

    Args:
        gamma_min: at least 1, because the first token is drafted before gamma is known.
        gamma_max: None is ``num_assistant_tokens``.
        beta: in [0, 1), 0 does not smooth.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an argument out of range, or gamma_min above gamma_max.

    Source: none; defined here.
    """

    name = "egag"
    reads_token_stats = True

    def __init__(self, gamma_min: int = 1, gamma_max: int | None = None, beta: float = 0.0) -> None:
        self.gamma_min = check_integer("gamma_min", gamma_min, 1, MAX_DRAFT_LENGTH)
        self.gamma_max = check_length("gamma_max", gamma_max, self.gamma_min)
        self.beta = check_number("beta", beta, 0, 1)
        if beta == 1:
            raise ValueError("beta must be below 1, got 1")

    def start(self, context: ScheduleContext) -> None:
        super().start(context)
        if self.gamma_max is not None:
            self.max_draft = self.gamma_max
        self._average = np.full(context.batch_size, np.nan)

    def lengths(self, most: Lengths) -> Lengths:
        self._most = most
        self._h_norm = np.full(len(most), np.nan)
        self._gamma = np.zeros_like(most)
        return np.full_like(most, self.max_draft)

    def continue_drafting(self, number: int, stats: TokenStats) -> Flags:
        if number == 0:
            self._set_gamma(stats)
        return number + 1 < self._gamma

    def cut(self, stats: list[TokenStats], counts: Lengths, *, drawn: bool) -> Lengths:
        if not stats:
            return counts
        self._set_gamma(stats[0])
        return np.minimum(counts, self._gamma)

    def _set_gamma(self, stats: TokenStats) -> None:
        entropy = stats.entropy.astype(np.float64) / np.log(max(self.context.vocab_size, 2))
        h_norm: NDArray[np.float64] = np.where(np.isnan(entropy), 1 - stats.probability, entropy)
        self._h_norm = h_norm.clip(0, 1)
        mixed = self.beta * self._average + (1 - self.beta) * self._h_norm
        mixed = np.where(np.isnan(self._average), self._h_norm, mixed)
        drafts = (self._most > 0) & ~np.isnan(h_norm)
        self._average = np.where(drafts, mixed, self._average)
        shortest = min(self.gamma_min, self.max_draft)
        gamma = np.rint(self.max_draft - (self.max_draft - shortest) * np.nan_to_num(mixed))
        self._gamma = np.where(drafts, np.minimum(gamma.astype(np.int64), self._most), 0)

    def record(self) -> dict[str, Any]:
        h_norm = [None if np.isnan(h) else round(float(h), 6) for h in self._h_norm]
        return {"h_norm": h_norm, "gamma": self._gamma.tolist()}
