"""A suffix automaton over one text that grows."""

from __future__ import annotations

from specdec_host import _library
from specdec_host.arguments.arrays import Array, require_array
from specdec_host.arguments.checks import (
    MAX_MATCH,
    check_chains,
    check_integer,
    check_probability,
)
from specdec_host.corpus import Corpus
from specdec_host.proposal import Proposal


class SuffixAutomaton:
    """Finds where the end of a text occurred before, and what followed it there.

    The context is the longest end of the text, of at most ``max_match`` tokens, that occurred
    before. Of the tokens that followed it the most frequent is drafted, of equally frequent ones
    the latest: the most frequent one is accepted most often if the text goes on as before, and the
    latest belongs to what is written about now. After it comes what followed the context with
    this token, and so on. A draft that reaches the end of the text goes on after shorter contexts.

    Appending takes amortized constant time for each token; a single token may take longer where it
    ends a long run of one token. A proposal depends on ``gamma``, ``count`` and the number of
    different tokens that followed the context, not on the length of the text. A text takes 45 to
    140 bytes a token, never more than 230 (`nbytes`).

    After a context that more than 1024 different tokens followed, only those are considered that
    did so for the first time last.

    Threads may share an automaton; they take turns, and the GIL is not held meanwhile.

    Args:
        max_match: most tokens of a context.
        corpus: a text to copy from too. The longer of both matches comes first.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: ``max_match`` is not in [1, 65536].

    Source: Blumer et al., The smallest automaton recognizing the subwords of a text, 1985;
    SAM Decoding (arXiv 2411.10666).

    Example:
        >>> import numpy as np
        >>> text = SuffixAutomaton()
        >>> text.append(np.array([5, 6, 7, 5, 6, 8, 5, 6, 8, 5, 6]))
        >>> proposal = text.propose(gamma=3, count=2)
        >>> proposal.tokens.tolist(), proposal.match_length
        ([[8, 5, 6], [7, 5, 6]], 5)
    """

    def __init__(self, max_match: int = 32, corpus: Corpus | None = None) -> None:
        if corpus is not None and not isinstance(corpus, Corpus):
            raise TypeError(f"corpus must be a Corpus or None, got {type(corpus).__name__}")
        self.max_match = check_integer("max_match", max_match, 1, MAX_MATCH)
        self.corpus = corpus
        self._native = _library.SuffixAutomaton(
            self.max_match, None if corpus is None else corpus.native
        )

    def append(self, tokens: Array) -> None:
        """Make the text longer.

        Args:
            tokens: [n] int32 or int64, ids in [0, 2^31).

        Raises:
            TypeError: not an array of one of these types.
            ValueError: more than one dimension, or an id out of range. Nothing is appended then;
                nor to a text that would get longer than 2^30 tokens.
        """
        self._native.append(require_array(tokens, "tokens"))

    def reserve(self, tokens: int) -> None:
        """Take the memory for a text of this length now, so that no append has to move it."""
        self._native.reserve(check_integer("tokens", tokens, 0))

    def propose(
        self, gamma: int, *, count: int = 1, min_match: int = 1, min_confidence: float = 0.0
    ) -> Proposal:
        """Draft the tokens that may come next.

        Args:
            gamma: most tokens of a chain, within which several chains differ. So ask for each text
                with its own: others may be among the chains of a smaller one.
            count: most chains. They differ, and the first is the one that ``count=1`` gives. Others
                branch off where their estimated probability is highest, also to tokens that
                followed shorter contexts.
            min_match: fewest tokens of a context.
            min_confidence: a chain ends before the product of its confidences falls below this.

        Raises:
            TypeError: an argument of a wrong type.
            ValueError: an argument out of range.
        """
        gamma, count = check_chains(gamma, count)
        min_match = check_integer("min_match", min_match, 1, self.max_match)
        min_confidence = check_probability("min_confidence", min_confidence)
        return Proposal(*self._native.propose(gamma, count, min_match, min_confidence))

    def count(self, ngram: Array) -> int:
        """How often an n-gram of at most ``max_match + 1`` tokens occurs in the text.

        Args:
            ngram: [n] int32 or int64, ids in [0, 2^31). Overlapping occurrences count.
        """
        return self._native.count(require_array(ngram, "ngram"))

    def __len__(self) -> int:
        return len(self._native)

    @property
    def num_states(self) -> int:
        """Number of states, fewer than twice the number of tokens."""
        return self._native.num_states

    @property
    def nbytes(self) -> int:
        """Bytes that the automaton holds, without its corpus."""
        return self._native.nbytes
