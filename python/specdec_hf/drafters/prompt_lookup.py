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

    def propose_several(self, history: History, gamma: int, count: int) -> torch.Tensor | None:
        """Up to ``count`` different continuations of every row, [B, count, gamma], best first."""
        tokens = np.full((len(history.lengths), count, gamma), -1, dtype=np.int64)
        for b in np.flatnonzero(history.active):
            row = history.tokens[b, : history.lengths[b]]
            for k, found in enumerate(
                lookup_several(row, gamma, count, self.max_ngram, self.min_ngram)
            ):
                tokens[b, k] = found
        return torch.from_numpy(tokens) if (tokens >= 0).any() else None


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
    ends, sizes = _matches(tokens, max_ngram, min_ngram)
    if not len(ends):
        return tokens[:0]
    return _copied(tokens, ends[np.flatnonzero(sizes == sizes.max())[-1]], gamma)


def lookup_several(
    tokens: NDArray[np.int64], gamma: int, count: int, max_ngram: int, min_ngram: int = 1
) -> list[NDArray[np.int64]]:
    """Up to ``count`` different continuations as of `lookup`: those of longer matches first, of
    equally long ones the latest.

    Example:
        >>> import numpy as np
        >>> row = np.array([5, 6, 7, 5, 6, 8, 5, 6])
        >>> [found.tolist() for found in lookup_several(row, 2, 3, max_ngram=2)]
        [[8, 5], [7, 5]]
    """
    ends, sizes = _matches(tokens, max_ngram, min_ngram)
    found: dict[tuple[int, ...], NDArray[np.int64]] = {}
    for end in ends[np.lexsort((-ends, -sizes))]:
        copied = _copied(tokens, end, gamma)
        found.setdefault(tuple(copied.tolist()), copied)
        if len(found) == count:
            break
    return list(found.values())


def _matches(
    tokens: NDArray[np.int64], max_ngram: int, min_ngram: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the ending occurred before: index of its last token there, length of the match."""
    length = len(tokens)
    # Candidates end where the last token occurred before; each longer n-gram thins them out.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) if length > 1 else np.empty(0, np.int64)
    sizes = np.ones(len(ends), dtype=np.int64)
    longest = np.arange(len(ends))
    for size in range(1, min(max_ngram, length - 1)):
        longest = longest[ends[longest] >= size]
        longest = longest[tokens[ends[longest] - size] == tokens[length - 1 - size]]
        if not len(longest):
            break
        sizes[longest] = size + 1
    return ends[sizes >= min_ngram], sizes[sizes >= min_ngram]


def _copied(tokens: NDArray[np.int64], end: int, gamma: int) -> NDArray[np.int64]:
    start = int(end) + 1
    return tokens[start + np.arange(gamma) % (len(tokens) - start)]
