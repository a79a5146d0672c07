"""The draft length that maximises the measured tokens per second."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.schedules.base import (
    Lengths,
    Outcome,
    Schedule,
    ScheduleContext,
    check_length,
)
from specdec_hf.schedules.heuristic import MAX_LENGTH

FORGETTING = 0.97
PRIOR_WEIGHT = 2.0
# The length is chosen anew in each of the first rounds and in every fourth after them, because
# acceptance and costs change slowly and choosing takes the host 0.1 ms.
FIRST_ROUNDS, CHOOSE_EVERY = 8, 4
EXPLORE_EVERY = 8
EXPLORE_AT_LEAST = 0.9


class AcceptanceByPosition:
    """How often the draft at position i is accepted where all before it were, by recent rounds.

    Positions that were tried less often than `PRIOR_WEIGHT` rounds lean on the rate of all
    positions together, and that on one half. Counts decay by `FORGETTING` a round.
    """

    def __init__(self, max_length: int) -> None:
        self._tried = [0.0] * max_length
        self._accepted = [0.0] * max_length

    def observe(self, outcome: Outcome) -> None:
        """Count the drafts of a round that the verification decided about."""
        accepted = outcome.accepted.tolist()
        tried = (outcome.accepted + outcome.rejected).tolist()
        for counts, lengths in ((self._accepted, accepted), (self._tried, tried)):
            for i, count in enumerate(counts):
                counts[i] = FORGETTING * count + sum(n > i for n in lengths)

    def expected_tokens(self) -> list[float]:
        """[max_length + 1], expected tokens of a round by draft length 0, 1, ..."""
        weight = PRIOR_WEIGHT
        overall = (sum(self._accepted) + 0.5 * weight) / (sum(self._tried) + weight)
        reached, expected = 1.0, [1.0]
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            reached *= (accepted + weight * overall) / (tried + weight)
            expected.append(expected[-1] + reached)
        return expected


class OptimalSchedule(Schedule):
    """Drafts the length g that maximises ``E(g) / (D(g) + F(g + 1))``.

    E(g), the expected tokens, follows from the measured acceptance by position; D(g), the time of
    drafting, and F(n), that of a target's forward of n tokens, are measured as well (`Costs`). It
    is Theorem 3.8 of Leviathan et al. 2023 (arXiv 2211.17192) with a verification that is not free.
    One length serves the whole batch, because the forward is as wide as its longest draft. In trees
    it is the depth, and n the nodes down to it. Of the nodes of a tree it then takes as many as
    maximise the same ratio, E being one and the sum of the probabilities that they are committed.

    Every eighth round tries another length, half or twice the best one or next to it, if that is
    expected to be at least 0.9 times as fast. Such a round may last twice as long, so trying costs
    at most about 2 % of the time.

    Args:
        max_length: most tokens, in trees at most their depth; None is 16, or
            ``num_assistant_tokens`` where that is more.

    Raises:
        TypeError: max_length is not an integer.
        ValueError: max_length outside [1, 1024].
    """

    name = "optimal"
    reads_clock = True
    mixes_sequences = True
    trees = True
    sizes_trees = True
    joins = True

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = check_length("max_length", max_length)

    def start(self, context: ScheduleContext) -> None:
        super().start(context)
        number = context.num_assistant_tokens
        most = max(number, MAX_LENGTH) if self.max_length is None else self.max_length
        self.max_draft = min(number, most) if context.tree else most
        self._acceptance = AcceptanceByPosition(self.max_draft)
        self._rounds = 0
        self._length = self._best = self._measured = min(number, self.max_draft)

    def lengths(self, most: Lengths) -> Lengths:
        return np.full_like(most, self._length)

    def observe(self, outcome: Outcome) -> None:
        if not outcome.drafted.any():
            return
        self._acceptance.observe(outcome)
        self._rounds += 1
        self._measured = max(self._measured, int(outcome.drafted.max()))
        self._length = self._best
        explores = self._rounds % EXPLORE_EVERY == 0
        early = self._rounds <= FIRST_ROUNDS
        if not (early or explores or self._rounds % CHOOSE_EVERY == 0):
            return
        if not self.context.costs.known:  # only the draft model's first round was seen
            return
        speeds = self.speeds()
        # Times far beyond the measured ones are guesses.
        measured = speeds[: 2 * self._measured]
        self._length = self._best = best = 1 + measured.index(max(measured))
        if explores:
            others = deque((best + 1, best - 1, 2 * best, best // 2))
            others.rotate(self._rounds // EXPLORE_EVERY)
            fast = EXPLORE_AT_LEAST * speeds[best - 1]
            worth = (g for g in others if 1 <= g <= self.max_draft and speeds[g - 1] >= fast)
            self._length = next(worth, best)

    def nodes(self, depth: int, values: NDArray[np.float64]) -> int:
        most: int = values.shape[1]
        seconds = self.context.costs.trees(depth, most)
        if not seconds:
            # No round with drafts was measured: the sequences share the tokens of one alone.
            return max((1 + most) // self.context.batch_size - 1, 1)
        tokens = 1 + np.concatenate([[0.0], values.cumsum(axis=1).mean(axis=0)])
        return int((tokens[: len(seconds)] / np.maximum(seconds, 1e-12)).argmax())

    def speeds(self) -> list[float]:
        """[max_length], expected tokens per second by draft length 1, 2, ..."""
        costs, tokens = self.context.costs, self._acceptance.expected_tokens()
        return [tokens[g] / max(costs.round(g) or 0.0, 1e-12) for g in range(1, self.max_draft + 1)]

    def record(self) -> dict[str, Any]:
        return {"gamma": self._length}
