"""One budget of drafted tokens for the whole batch, spent where acceptance is most likely."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer
from specdec_hf.schedules.base import (
    Flags,
    Lengths,
    Schedule,
    ScheduleContext,
    TokenStats,
    check_length,
)


class BudgetSchedule(Schedule):
    """Keeps the ``tokens`` drafts of the batch with the largest cumulative confidence.

    The cumulative confidence of a draft is the product of the probabilities of the drafts before it
    and of its own; in its own place a drawn token has the largest probability of its distribution,
    which does not depend on what was drawn. A confidence may depend on it, so a drawn token without
    an entropy counts as certain in its own place. The product never grows along a draft, so that
    what is kept always is a prefix. The forward of the target is as wide as the longest draft.

    Args:
        tokens: for the whole batch; None is ``num_assistant_tokens`` for each sequence.
        max_length: most tokens of one sequence; None is twice ``num_assistant_tokens``.

    Raises:
        TypeError: an argument that is not an integer.
        ValueError: a number below 1.

    Source: TETRIS (arXiv 2502.15197), which scores a token by its own probability too. That biases
    text that is sampled; the largest probability in its place does not.
    """

    name = "budget"
    reads_token_stats = True
    mixes_sequences = True
    joins = True

    def __init__(self, tokens: int | None = None, max_length: int | None = None) -> None:
        self.tokens = None if tokens is None else check_integer("tokens", tokens, 1)
        self.max_length = check_length("max_length", max_length)

    def start(self, context: ScheduleContext) -> None:
        super().start(context)
        number = context.num_assistant_tokens
        self._tokens = number * context.batch_size if self.tokens is None else self.tokens
        self.max_draft = 2 * number if self.max_length is None else self.max_length

    def lengths(self, most: Lengths) -> Lengths:
        lengths = np.minimum(self.max_draft, most)
        self._on = lengths > 0
        self._wanted = self._kept = lengths
        self._before = np.ones(len(most))  # product of the probabilities of the drafts so far
        self._scores: list[NDArray[np.float64]] = []
        self._stats: list[TokenStats] = []
        return lengths

    def continue_drafting(self, number: int, stats: TokenStats) -> Flags:
        self._stats.append(stats)
        self._on &= ~np.isnan(stats.probability)  # what a drafter ended by itself takes no budget
        self._scores.append(np.where(self._on, self._before * stats.largest, -1.0))
        self._before = self._before * stats.probability
        best = np.sort(np.concatenate(self._scores))[::-1][: self._tokens]
        # The score of a sequence's next draft is at most its product so far.
        may_be_kept = (len(best) < self._tokens) | (self._before >= best[-1])
        self._on = self._on & may_be_kept & (number + 1 < self._wanted)
        return self._on

    def settle(self, counts: Lengths) -> Lengths:
        return self.cut(self._stats, counts, drawn=True)

    def cut(self, stats: list[TokenStats], counts: Lengths, *, drawn: bool) -> Lengths:
        self._kept = best_prefixes(stats, counts, self._tokens, drawn=drawn)
        return self._kept

    def record(self) -> dict[str, Any]:
        return {"gamma": self._kept.tolist()}


def best_prefixes(
    stats: list[TokenStats], counts: Lengths, tokens: int, *, drawn: bool = False
) -> Lengths:
    """[B] how many drafts each sequence keeps of the ``tokens`` best ones of the batch.

    Where the tokens were ``drawn``, the choice whether to keep one does not depend on it.

    Example:
        >>> import numpy as np
        >>> stats = [TokenStats.of_confidence(np.array(c)) for c in ([0.9, 0.5], [0.8, 0.9])]
        >>> best_prefixes(stats, np.array([2, 2]), 3).tolist()
        [2, 1]
    """
    if not stats:
        return counts
    probability = np.stack([one.probability for one in stats], axis=1).astype(np.float64).clip(0, 1)
    largest = np.stack([one.largest for one in stats], axis=1).astype(np.float64).clip(0, 1)
    if drawn:
        only_confidence = np.isnan(np.stack([one.entropy for one in stats], axis=1))
        largest = np.where(only_confidence, 1.0, largest)
    before = np.concatenate([np.ones((len(counts), 1)), probability.cumprod(axis=1)[:, :-1]], 1)
    # Rounding must not let a later draft of a sequence score above an earlier one.
    scores = np.minimum.accumulate(before * largest, axis=1)
    absent = np.arange(len(stats)) >= counts[:, None]
    order = np.lexsort(
        (np.broadcast_to(np.arange(len(stats)), scores.shape).ravel(), -scores.ravel())
    )
    order = order[~absent.ravel()[order]][:tokens]
    return np.bincount(order // len(stats), minlength=len(counts)).astype(np.int64)
