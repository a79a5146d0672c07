"""NASD: drafts from counts of n-grams, to which the target adds its most likely next tokens.

The ending of a text is its last n tokens, as in copying.py.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer
from specdec_hf.drafters.ngram_table import NgramCounts
from specdec_hf.drafting.context import Candidates, DraftContext, History
from specdec_hf.drafting.drafter import Draft, Drafter
from specdec_hf.trees import MAX_NODES


class NasdDrafter(Drafter, entry="nasd"):
    """Drafts the most counted token after the longest known ending, again and again.

    Each sequence has counts of its own. Every committed token is counted after the endings of
    the text before it, those of the prompt included. The target's ``top_k`` most likely tokens are
    counted there too, so likely continuations that were not taken are known as well. A call
    begins without counts.

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

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2, top_k: int = 3) -> None:
        self.max_ngram = check_integer("max_ngram", max_ngram, 1, MAX_NODES)
        self.min_ngram = check_integer("min_ngram", min_ngram, 1, MAX_NODES)
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram must be at most max_ngram={self.max_ngram}, got {self.min_ngram}"
            )
        self.candidates = check_integer("top_k", top_k, 0, MAX_NODES)

    def start(self, context: DraftContext) -> None:
        """Begin without counts."""
        self._num_proposals = context.num_proposals
        self._counts = [
            NgramCounts(self.max_ngram, self.min_ngram) for _ in range(context.batch_size)
        ]
        self._observed: tuple[NDArray[np.int64], Candidates] | None = None

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        """Chains that differ in their first token."""
        self._count(history)
        count, gamma = self._num_proposals, int(limits.max())
        chains = np.full((len(history.lengths), count, gamma), -1, dtype=np.int64)
        for b in np.flatnonzero(history.active).tolist():
            ending = self._ending(history.tokens[b], int(history.lengths[b]))
            for k, token in enumerate(self._counts[b].ranking(ending)[:count]):
                follow = self._counts[b].continuation([*ending, token], gamma - 1)
                chains[b, k, : len(follow) + 1] = [token, *follow]
        if (chains < 0).all():
            return None
        return Draft(torch.from_numpy(chains).flatten(1), num_proposals=count)

    def observe(self, history: History, candidates: Candidates) -> None:
        self._count(history)
        self._observed = history.lengths.copy(), candidates

    def _count(self, history: History) -> None:
        """Count what was committed since the last time, and the target's tokens after that."""
        observed, self._observed = self._observed, None
        for b in np.flatnonzero(history.active).tolist():
            text = history.tokens[b, : history.lengths[b]]
            self._counts[b].extend(text)
            if observed is not None:
                begin, candidates = int(observed[0][b]), observed[1]
                for at, row in enumerate(candidates.path(b, text[begin:].tolist()), begin):
                    self._counts[b].add(self._ending(text, at), candidates.ids[b, row].tolist())

    def _ending(self, text: NDArray[np.int64], at: int) -> list[int]:
        """Up to ``max_ngram`` tokens of the text before index ``at``."""
        ending: list[int] = text[max(0, at - self.max_ngram) : at].tolist()
        return ending
