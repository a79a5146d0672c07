"""A suffix automaton over each sequence, and a corpus beside it, as a drafter."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.base import Draft, DraftContext, Drafter, History

if TYPE_CHECKING:
    from specdec_host import Corpus, Proposal, SuffixAutomaton


class SuffixAutomatonDrafter(Drafter):
    """Copies what most often followed the longest end of a sequence that occurred before.

    `specdec_host.SuffixAutomaton` says which continuation is taken. Each sequence of the batch has
    an automaton of its own, which is given the new tokens of every round.

    Args:
        corpus: a text to copy from too: a `specdec_host.Corpus`, or its ids [n], int32 or int64.
            Several drafters may share a `Corpus`.
        min_match: fewest tokens of a match that gives a draft.
        max_match: most tokens of a match that are looked at.

    Attributes:
        confidence: [B, gamma] float32, estimated probability of each token of the last draft after
            those before it; None if there was none.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: not 1 <= min_match <= max_match <= 65536, or ids out of range.
        ImportError: `specdec_host` was not built.

    Source: SAM Decoding (arXiv 2411.10666).
    """

    name = "suffix_automaton"
    several = True

    def __init__(
        self,
        corpus: Corpus | NDArray[Any] | None = None,
        min_match: int = 2,
        max_match: int = 32,
    ) -> None:
        import specdec_host  # noqa: PLC0415  # only this drafter needs the native module

        if isinstance(corpus, np.ndarray):
            corpus = specdec_host.Corpus(corpus)
        self._make = functools.partial(specdec_host.SuffixAutomaton, max_match, corpus)
        self._make().propose(1, min_match=min_match)  # validates them
        self.corpus, self.min_match, self.max_match = corpus, min_match, max_match
        self.confidence: NDArray[np.float32] | None = None

    def start(self, context: DraftContext) -> None:
        """Begin a new call with empty automata."""
        self._texts: list[SuffixAutomaton] = [self._make() for _ in range(context.batch_size)]
        self.confidence = None

    def propose(self, history: History, gamma: int) -> Draft | None:
        tokens, self.confidence = self._propose(history, gamma, 1)
        counts = (tokens[:, 0] >= 0).sum(axis=1)
        return Draft(torch.from_numpy(tokens[:, 0]), counts=counts) if counts.any() else None

    def propose_several(self, history: History, gamma: int, count: int) -> torch.Tensor | None:
        """[B, count, gamma], different chains of every sequence, best first, then -1."""
        tokens, self.confidence = self._propose(history, gamma, count)
        return torch.from_numpy(tokens) if (tokens >= 0).any() else None

    def _propose(
        self, history: History, gamma: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens [B, count, gamma], and the confidence [B, gamma] of the first chains."""
        batch_size = len(history.lengths)
        tokens = np.full((batch_size, count, gamma), -1, dtype=np.int64)
        confidence = np.zeros((batch_size, gamma), dtype=np.float32)
        for b in np.flatnonzero(history.active):
            text = self._texts[b]
            text.append(history.tokens[b, len(text) : history.lengths[b]])
            proposal: Proposal = text.propose(gamma, count=count, min_match=self.min_match)
            tokens[b], confidence[b] = proposal.tokens, proposal.confidence[0]
        return tokens, confidence
