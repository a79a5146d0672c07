"""REST: drafts retrieved from a datastore (He et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specdec_hf.drafters.model_free.copying import CopyingDrafter

if TYPE_CHECKING:
    from specdec_host import Corpus, Proposal
    from typing_extensions import Self


class RestDrafter(CopyingDrafter, entry="rest"):
    """Copies what most often followed the longest end of a sequence in a datastore.

    The matches are found by binary search in the datastore's suffix array. Of their continuations
    the most frequent ones are drafted: one chain, or several that `TrieTree` merges into a tree.
    `SuffixAutomatonDrafter` looks into the sequence itself too.

    Args:
        corpus: the datastore: a `specdec_host.Corpus`, which `Corpus.open` maps from a file that
            ``python -m specdec_hf build rest`` wrote.
        min_match: fewest tokens of a match that gives a draft.
        max_match: most tokens of a match that are looked at.
        min_confidence: a chain ends before the product of its confidences falls below this.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: not 1 <= min_match <= max_match <= 65536, or a confidence outside of [0, 1].
        ImportError: `specdec_host` was not built.

    Source: REST (arXiv 2311.08252).
    """

    def __init__(
        self,
        corpus: Corpus,
        min_match: int = 2,
        max_match: int = 16,
        min_confidence: float = 0.03,
    ) -> None:
        import specdec_host  # noqa: PLC0415  # only drafters that copy need the native module

        if not isinstance(corpus, specdec_host.Corpus):
            raise TypeError(f"corpus must be a Corpus, got {type(corpus).__name__}")
        super().__init__(corpus)
        self._datastore = corpus
        self.min_match, self.max_match = min_match, max_match
        self.min_confidence = min_confidence
        self.copy(0, np.empty(0, dtype=np.int64), 1, 1)  # validates them

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads the datastore in a file."""
        import specdec_host  # noqa: PLC0415

        return cls(specdec_host.Corpus.open(text))

    def copy(self, b: int, text: NDArray[np.int64], gamma: int, count: int) -> Proposal:
        return self._datastore.propose(
            text[max(0, len(text) - self.max_match) :],
            gamma,
            count=count,
            min_match=self.min_match,
            max_match=self.max_match,
            min_confidence=self.min_confidence,
        )
