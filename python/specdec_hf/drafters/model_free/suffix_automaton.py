"""A suffix automaton over each sequence, and a corpus beside it, as a drafter."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.drafters.context import DraftContext
from specdec_hf.drafters.model_free.copying import CopyingDrafter

if TYPE_CHECKING:
    from specdec_host import Corpus, Proposal, SuffixAutomaton
    from typing_extensions import Self


class SuffixAutomatonDrafter(CopyingDrafter, entry="suffix_automaton"):
    """Copies what most often followed the longest end of a sequence that occurred before.

    `specdec_host.SuffixAutomaton` says which continuation is taken. Each sequence of the batch has
    an automaton of its own, which is given the new tokens of every round.

    Args:
        corpus: a text to copy from too: a `specdec_host.Corpus`, or its ids [n], int32 or int64.
            Several drafters may share a `Corpus`.
        min_match: fewest tokens of a match that gives a draft.
        max_match: most tokens of a match that are looked at.
        min_confidence: a chain ends before the product of its confidences falls below this.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: not 1 <= min_match <= max_match <= 65536, a confidence outside of [0, 1], or ids
            out of range.
        ImportError: `specdec_host` was not built.

    Source: SAM Decoding (arXiv 2411.10666).
    """

    def __init__(
        self,
        corpus: Corpus | NDArray[Any] | None = None,
        min_match: int = 1,
        max_match: int = 32,
        min_confidence: float = 0.03,
    ) -> None:
        import specdec_host  # noqa: PLC0415  # only drafters that copy need the native module

        if isinstance(corpus, np.ndarray):
            corpus = specdec_host.Corpus(corpus)
        self._make = functools.partial(specdec_host.SuffixAutomaton, max_match, corpus)
        self.min_match, self.max_match = min_match, max_match
        self.min_confidence = min_confidence
        self._propose_from(self._make(), 1, 1)  # validates them
        super().__init__(corpus)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Copies from the datastore in a file too, if there is one."""
        import specdec_host  # noqa: PLC0415

        return cls(specdec_host.Corpus.open(text) if text else None)

    def start(self, context: DraftContext) -> None:
        """Begin a new call with empty automata.

        Raises:
            ValueError: a corpus for another vocabulary.
        """
        super().start(context)
        self._texts: list[SuffixAutomaton] = [self._make() for _ in range(context.batch_size)]

    def copy(self, b: int, text: NDArray[np.int64], gamma: int, count: int) -> Proposal:
        automaton = self._texts[b]
        automaton.append(text[len(automaton) :])
        return self._propose_from(automaton, gamma, count)

    def _propose_from(self, text: SuffixAutomaton, gamma: int, count: int) -> Proposal:
        return text.propose(
            gamma, count=count, min_match=self.min_match, min_confidence=self.min_confidence
        )
