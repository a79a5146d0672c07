"""Counts of the tokens after n-grams, of a text that grows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec_hf.drafters.model_free.ngram_table import NONE, Followers


class NgramCounts:
    """Counts of the tokens that followed each n-gram, in dictionaries.

    The ending of a text is its last n tokens, as in prompt_lookup.py.

    Args:
        max_ngram, min_ngram: longest and shortest n-gram that is stored. The empty one, 0, is
            followed by every token.

    Example:
        >>> counts = NgramCounts(max_ngram=2, min_ngram=1)
        >>> counts.extend(np.array([5, 6, 7, 5, 6]))
        >>> counts.add([5, 6], [8, 7])
        >>> counts.ranking([5, 6]), counts.ranking([4, 6]), counts.ranking([4])
        ([7, 8], [7, 8], [])
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._length = 0  # of the text that was counted
        # n-gram -> counts of the tokens after it, the one that was counted last at the end
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}

    def extend(self, text: NDArray[np.int64]) -> None:
        """Count each token of ``text`` after those counted before, which it begins with."""
        longest = self._sizes.start
        begin = max(0, self._length - longest)
        tokens = text[begin:].tolist()
        for end in range(self._length - begin, len(tokens)):
            self.add(tokens[max(0, end - longest) : end], tokens[end : end + 1])
        self._length = len(text)

    def add(self, text: Sequence[int], tokens: Sequence[int]) -> None:
        """Count each of some tokens once after every ending of ``text``."""
        whole, length = tuple(text), len(text)
        for size in self._sizes:
            if size <= length:
                counts = self._counts.setdefault(whole[length - size :], {})
                for token in tokens:
                    counts[token] = counts.pop(token, 0) + 1

    def followers(self, ngram: Sequence[int]) -> Followers:
        """The tokens that followed an n-gram, and how often each did."""
        counts = self._counts.get(tuple(ngram))
        if counts is None:
            return NONE
        return np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64)

    def ranking(self, text: Sequence[int]) -> list[int]:
        """All tokens after the endings of ``text``, best first.

        Those after longer endings come first; after one ending, those with larger counts do. Of
        equal counts, the one that was reached first comes first.
        """
        ranked: dict[int, None] = {}
        for ngram in self._endings(text):
            counts = self._counts.get(ngram, {})
            ranked.update(dict.fromkeys(sorted(counts, key=lambda token: -counts[token])))
        return list(ranked)

    def best(self, text: Sequence[int]) -> int | None:
        """The first token of `ranking`; None if no ending is stored."""
        for ngram in self._endings(text):
            if counts := self._counts.get(ngram):
                return max(counts, key=lambda token: counts[token])
        return None

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that follow, each the best one; fewer where none is known."""
        grown = list(text)
        while len(grown) < len(text) + count and (token := self.best(grown)) is not None:
            grown.append(token)
        return grown[len(text) :]

    def _endings(self, text: Sequence[int]) -> Iterable[tuple[int, ...]]:
        length = len(text)
        return (tuple(text[length - size :]) for size in self._sizes if size <= length)
