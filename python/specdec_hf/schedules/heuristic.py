"""Constant draft lengths, and the "heuristic" ones of Transformers with an upper bound."""

from __future__ import annotations

import numpy as np

from specdec_hf.arguments import check_integer
from specdec_hf.schedules.base import LONGEST_DRAFT, Lengths, Outcome, Schedule, ScheduleContext


class ConstantSchedule(Schedule):
    """``num_assistant_tokens`` in every round."""

    name = "constant"
    trees = True

    def lengths(self, most: Lengths) -> Lengths:
        return np.minimum(self.context.num_assistant_tokens, most)


LONGEST = 16


class HeuristicSchedule(Schedule):
    """Two more tokens after a fully accepted draft, one fewer otherwise, within [1, ``longest``].

    Each call begins with ``num_assistant_tokens``. In Transformers "heuristic" carries the length
    over to the next call in the assistant's configuration and "heuristic_transient" does not; here
    both are the same, because a text must not depend on the calls before it.

    Args:
        longest: most tokens; ``num_assistant_tokens`` where that is more.

    Raises:
        TypeError: longest is not an integer.
        ValueError: longest outside [1, 1024].
    """

    name = "heuristic"

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = check_integer("longest", longest, 1, LONGEST_DRAFT)

    def start(self, context: ScheduleContext) -> None:
        super().start(context)
        self.max_draft = max(self.longest, context.num_assistant_tokens)
        self._lengths = np.full(context.batch_size, context.num_assistant_tokens, dtype=np.int64)

    def lengths(self, most: Lengths) -> Lengths:
        return np.minimum(self._lengths, most)

    def observe(self, outcome: Outcome) -> None:
        change = np.where(outcome.accepted == outcome.drafted, 2, -1)
        changed = (self._lengths + change).clip(1, self.max_draft)
        learns = (outcome.drafted > 0) & (self._lengths > 0)
        self._lengths = np.where(learns, changed, self._lengths)
