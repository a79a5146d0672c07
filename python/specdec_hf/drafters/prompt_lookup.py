"""Prompt lookup: the continuation of the last place where the current ending occurred before."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.base import Draft, DraftContext, Drafter, History

MIN_EXPECTED = 0.6
PRIOR_PER_TOKEN = 0.5
LEARNING_RATE = 0.3
RECOVERY = 0.02  # what a passed match regains, so that it is tried again some day


class PromptLookupDrafter(Drafter):
    """Copies what followed the latest of the longest earlier matches of the row's ending.

    Runs on the host over the tokens the loop has there anyway. Each row keeps a running mean of how
    many drafts were accepted after a match of each length, and passes where that promises less
    than a longer forward costs; rows are independent, and nothing depends on time.

    Args:
        max_ngram: longest ending to look for.
        min_ngram: shortest ending worth a draft.
        min_expected: accepted drafts a match must promise; 0 always drafts.

    Raises:
        ValueError: not 1 <= min_ngram <= max_ngram.
    """

    name = "prompt_lookup"

    def __init__(
        self, max_ngram: int = 4, min_ngram: int = 2, min_expected: float = MIN_EXPECTED
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                "need 1 <= min_ngram <= max_ngram, "
                f"got min_ngram={min_ngram}, max_ngram={max_ngram}"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.min_expected = min_expected
        self._reset(0)

    def start(self, context: DraftContext) -> None:
        self._reset(context.batch_size)

    def propose(self, history: History, gamma: int) -> Draft | None:
        rows = len(history.lengths)
        if len(self._sizes) != rows:
            self._reset(rows)
        tokens = np.full((rows, gamma), -1, dtype=np.int64)
        self._sizes[:] = 0
        for b in np.flatnonzero(history.active):
            row = history.tokens[b, : history.lengths[b]]
            found, size = lookup(row, gamma, self.max_ngram, self.min_ngram)
            if size and self._expected[b, size] < self.min_expected:
                self._expected[b, size] += RECOVERY
            elif size:
                tokens[b], self._sizes[b] = found, size
        if not self._sizes.any():
            return None
        return Draft(torch.from_numpy(tokens), counts=np.where(self._sizes > 0, gamma, 0))

    def commit(self, lengths: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        for b in np.flatnonzero(self._sizes):
            size = self._sizes[b]
            self._expected[b, size] += LEARNING_RATE * (accepted[b] - self._expected[b, size])
        self._sizes[:] = 0

    def _reset(self, rows: int) -> None:
        self._sizes = np.zeros(rows, dtype=np.int64)
        # Before anything is known a longer match promises more.
        self._expected = np.tile(np.arange(self.max_ngram + 1) * PRIOR_PER_TOKEN, (rows, 1))


def lookup(
    tokens: NDArray[np.int64], gamma: int, max_ngram: int, min_ngram: int = 1
) -> tuple[NDArray[np.int64], int]:
    """The ``gamma`` tokens that followed the latest of the longest earlier matches of the ending.

    Also the length of the match, 0 (and no tokens) if there is none of ``min_ngram`` or more.

    Where the copy reaches the end of ``tokens`` it goes on over its own beginning, as LZ77 does:
    the ending repeats with that period, and all drafts have one size, which keeps the shapes.

    Example:
        >>> import numpy as np
        >>> copied, size = lookup(np.array([5, 6, 7, 5, 6]), gamma=4, max_ngram=2)
        >>> copied.tolist(), size
        ([7, 5, 6, 7], 2)
    """
    length = len(tokens)
    # Candidates end where the last token occurred before; each longer n-gram thins them out.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) if length > 1 else np.empty(0, np.int64)
    size, best, best_size = 1, ends, min(len(ends), 1)
    while len(ends) and size < min(max_ngram, length - 1):
        ends = ends[ends >= size]
        ends = ends[tokens[ends - size] == tokens[length - 1 - size]]
        size += 1
        if len(ends):
            best, best_size = ends, size
    if best_size < min_ngram or not len(best):
        return tokens[:0], 0
    start = int(best[-1]) + 1
    return tokens[start + np.arange(gamma) % (length - start)], best_size
