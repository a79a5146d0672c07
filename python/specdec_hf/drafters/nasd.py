"""NASD: drafts from counts of n-grams, to which the target adds its most likely next tokens.

The ending of a text is its last n tokens, as in prompt_lookup.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer
from specdec_hf.drafters.context import Candidates, DraftContext, History
from specdec_hf.drafters.drafter import Draft, Drafter
from specdec_hf.trees.checks import MAX_NODES


class NgramStorage:
    """Counts of the tokens that followed each n-gram.

    Args:
        max_ngram, min_ngram: longest and shortest n-gram that is stored.

    Example:
        >>> storage = NgramStorage(max_ngram=2, min_ngram=1)
        >>> storage.add([5, 6], [7, 8])
        >>> storage.add([4, 6], [8])
        >>> storage.ranking([5, 6]), storage.ranking([6]), storage.ranking([5])
        ([7, 8], [8, 7], [])
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        # n-gram -> counts of the tokens after it, the one that was counted last at the end
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}

    def add(self, text: Sequence[int], tokens: Iterable[int]) -> None:
        """Count each of some tokens once after every ending of ``text``."""
        listed = list(tokens)
        for ngram in self._endings(text):
            counts = self._counts.setdefault(ngram, {})
            for token in listed:
                counts[token] = counts.pop(token, 0) + 1

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
        return (tuple(text[-size:]) for size in self._sizes if size <= len(text))


class NasdDrafter(Drafter):
    """Drafts the most counted token after the longest known ending, again and again.

    Each sequence has a storage of its own. Every committed token is counted after the endings of
    the text before it, those of the prompt included. The target's ``top_k`` most likely tokens are
    counted there too, so that the storage also knows continuations that were likely but not taken.
    A call begins with empty storages.

    Args:
        max_ngram: longest ending to look for; the N-gram model of the source has N = max_ngram + 1.
        min_ngram: shortest ending that gives a draft.
        top_k: how many of the target's most likely tokens are counted; 0 counts the text alone.

    Raises:
        TypeError: a number that is not an integer.
        ValueError: a number out of range, or not min_ngram <= max_ngram.

    Source: n-gram assisted speculative decoding of github.com/romsto/Speculative-Decoding; with
    ``top_k`` 0 or 1, arXiv 2404.08698.
    """

    name = "nasd"
    several = True

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, top_k: int = 3) -> None:
        self.max_ngram = check_integer("max_ngram", max_ngram, 1, MAX_NODES)
        self.min_ngram = check_integer("min_ngram", min_ngram, 1, MAX_NODES)
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram must be at most max_ngram={self.max_ngram}, got {self.min_ngram}"
            )
        self.candidates = check_integer("top_k", top_k, 0, MAX_NODES)

    def start(self, context: DraftContext) -> None:
        """Begin with empty storages."""
        self._storages = [
            NgramStorage(self.max_ngram, self.min_ngram) for _ in range(context.batch_size)
        ]
        self._counted = np.zeros(context.batch_size, dtype=np.int64)
        self._observed: tuple[NDArray[np.int64], Candidates] | None = None

    def propose(self, history: History, gamma: int) -> Draft | None:
        chains = self._propose(history, gamma, 1)
        return None if chains is None else Draft(chains[:, 0])

    def propose_several(self, history: History, gamma: int, count: int) -> torch.Tensor | None:
        """[B, count, gamma], chains that differ in their first token, best first, then -1."""
        return self._propose(history, gamma, count)

    def _propose(self, history: History, gamma: int, count: int) -> torch.Tensor | None:
        self._count(history)
        chains = np.full((len(history.lengths), count, gamma), -1, dtype=np.int64)
        for b in np.flatnonzero(history.active).tolist():
            ending = self._context(history.tokens[b].tolist(), int(history.lengths[b]))
            for k, token in enumerate(self._storages[b].ranking(ending)[:count]):
                follow = self._storages[b].continuation([*ending, token], gamma - 1)
                chains[b, k, : len(follow) + 1] = [token, *follow]
        return torch.from_numpy(chains) if (chains >= 0).any() else None

    def observe(self, history: History, candidates: Candidates) -> None:
        self._count(history)
        self._observed = history.lengths.copy(), candidates

    def _count(self, history: History) -> None:
        """Count what was committed since the last time, and the target's tokens after that."""
        observed, self._observed = self._observed, None
        for b in np.flatnonzero(history.active).tolist():
            text = history.tokens[b, : history.lengths[b]].tolist()
            for at in range(self._counted[b], len(text)):
                self._storages[b].add(self._context(text, at), [text[at]])
            self._counted[b] = len(text)
            if observed is not None:
                begin, candidates = int(observed[0][b]), observed[1]
                for at, row in enumerate(candidates.path(b, text[begin:]), begin):
                    likely = candidates.ids[b, row].tolist()
                    self._storages[b].add(self._context(text, at), likely)

    def _context(self, text: list[int], at: int) -> list[int]:
        """As much of the text before a place as the storage looks at."""
        return text[max(0, at - self.max_ngram) : at]
