"""The draft lengths "heuristic" of Transformers with an upper bound."""

from __future__ import annotations

import numpy as np

from specdec_hf.arguments import check_integer
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH, Lengths, Outcome, Schedule, ScheduleContext

MAX_LENGTH = 16


class HeuristicSchedule(Schedule):
    """Two more tokens after full acceptance, one fewer otherwise, within [1, ``max_length``].

    Each call begins with ``num_assistant_tokens``. In Transformers "heuristic" carries the length
    over to the next call in the assistant's configuration and "heuristic_transient" does not; here
    both are the same, because a text must not depend on the calls before it.

    Args:
        max_length: most tokens; ``num_assistant_tokens`` where that is more.

    Raises:
        TypeError: max_length is not an integer.
        ValueError: max_length outside [1, 1024].
    """

    name = "heuristic"

    def __init__(self, max_length: int = MAX_LENGTH) -> None:
        self.max_length = check_integer("max_length", max_length, 1, MAX_DRAFT_LENGTH)

    def start(self, context: ScheduleContext) -> None:
        super().start(context)
        self.max_draft = max(self.max_length, context.num_assistant_tokens)
        self._lengths = np.full(context.batch_size, context.num_assistant_tokens, dtype=np.int64)

    def lengths(self, most: Lengths) -> Lengths:
        return self._lengths

    def observe(self, outcome: Outcome) -> None:
        change = np.where(outcome.accepted == outcome.drafted, 2, -1)
        changed = (self._lengths + change).clip(1, self.max_draft)
        learns = (outcome.drafted > 0) & (self._lengths > 0)
        self._lengths = np.where(learns, changed, self._lengths)
