"""Prompt lookup: the continuation of the last place where the current ending occurred before."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.base import Draft, Drafter, History


class PromptLookupDrafter(Drafter):
    """Copies what followed the latest of the longest earlier matches of the row's ending.

    Runs on the host over the tokens the loop has there anyway; rows are independent.

    Args:
        max_ngram: longest ending to look for.
        min_ngram: shortest ending worth a draft.

    Raises:
        ValueError: not 1 <= min_ngram <= max_ngram.
    """

    name = "prompt_lookup"

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                "need 1 <= min_ngram <= max_ngram, "
                f"got min_ngram={min_ngram}, max_ngram={max_ngram}"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def propose(self, history: History, gamma: int) -> Draft | None:
        tokens = np.full((len(history.lengths), gamma), -1, dtype=np.int64)
        counts = np.zeros(len(history.lengths), dtype=np.int64)
        for b in np.flatnonzero(history.active):
            row = history.tokens[b, : history.lengths[b]]
            found = lookup(row, gamma, self.max_ngram, self.min_ngram)
            tokens[b, : len(found)] = found
            counts[b] = len(found)
        return Draft(torch.from_numpy(tokens), counts=counts) if counts.any() else None


def lookup(
    tokens: NDArray[np.int64], gamma: int, max_ngram: int, min_ngram: int = 1
) -> NDArray[np.int64]:
    """The ``gamma`` tokens that followed the latest of the longest earlier matches of the ending.
    None of them if there is no match of ``min_ngram`` tokens or more.

    Where the copy reaches the end of ``tokens`` it goes on over its own beginning, as LZ77 does:
    the ending repeats with that period, and all drafts have one size, which keeps the shapes.

    Example:
        >>> import numpy as np
        >>> lookup(np.array([5, 6, 7, 5, 6]), gamma=4, max_ngram=2).tolist()
        [7, 5, 6, 7]
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
        return tokens[:0]
    start = int(best[-1]) + 1
    return tokens[start + np.arange(gamma) % (length - start)]
