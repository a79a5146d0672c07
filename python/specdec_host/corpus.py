"""A text that does not change, searched through its suffix array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_host import _library
from specdec_host.arguments import LONGEST_MATCH, check_array, check_chains, check_integer
from specdec_host.proposal import Proposal

MOST_TOKENS = 2**31 - 1


class Corpus:
    """A text with its suffix array: 8 bytes a token, in memory or mapped from a file.

    Any number of automata and threads may read one corpus at once.

    Args:
        tokens: [n] int32 or int64, ids in [0, 2^31). They are copied unless they are int32 and
            contiguous; then they must not change afterwards.
        suffixes: [n] int32, the suffix array of the tokens; None builds it.
        progress: called with the finished part of the building, from 0 to 1.

    Raises:
        TypeError: not an array of one of these types.
        ValueError: wrong shapes, ids out of range, or 2^31 tokens and more.

    Source: Manber and Myers, Suffix arrays, 1990; REST (arXiv 2311.08252).

    Example:
        >>> import numpy as np
        >>> corpus = Corpus(np.array([5, 6, 7, 5, 6, 8, 5, 6, 8]))
        >>> corpus.propose(np.array([1, 5, 6]), gamma=2, count=2).tokens.tolist()
        [[8, 5], [7, 5]]
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        suffixes: NDArray[np.int32] | None = None,
        *,
        progress: Callable[[float], object] | None = None,
    ) -> None:
        self.tokens = _ids("tokens", tokens)
        if suffixes is None:
            suffixes = _library.sort_suffixes(self.tokens, progress)
        self.suffixes = _ids("suffixes", suffixes, check_values=False)
        if len(self.suffixes) != len(self.tokens):
            raise ValueError(
                f"suffixes must be [n] = [{len(self.tokens)}], got [{len(self.suffixes)}]"
            )
        self.native = _library.Corpus(self.tokens, self.suffixes)

    def propose(
        self,
        context: NDArray[Any],
        gamma: int,
        *,
        count: int = 1,
        min_match: int = 1,
        max_match: int = 32,
    ) -> Proposal:
        """Draft the tokens that may follow the end of a text.

        The longest end of the context that occurs in the corpus is searched. Of its continuations
        the most frequent come first, of equally frequent ones that with the lowest id. After more
        than 64 matches, continuations that are rarer than one in 64 may be left out.

        Args:
            context: [n] int32 or int64, ids in [0, 2^31).
            gamma: most tokens of a chain.
            count: most chains. They differ, and the first is the one that ``count=1`` gives. Others
                branch off where their estimated probability is highest.
            min_match, max_match: fewest and most tokens of a match.

        Raises:
            TypeError: an argument of a wrong type.
            ValueError: an argument out of range.
        """
        gamma, count = check_chains(gamma, count)
        max_match = check_integer("max_match", max_match, 1, LONGEST_MATCH)
        min_match = check_integer("min_match", min_match, 1, max_match)
        context = check_array("context", context)
        return Proposal(*self.native.propose(context, gamma, count, min_match, max_match))

    def count(self, ngram: NDArray[Any]) -> int:
        """How often an n-gram occurs.

        Args:
            ngram: [n] int32 or int64, ids in [0, 2^31). Overlapping occurrences count.
        """
        return self.native.count(check_array("ngram", ngram))

    def __len__(self) -> int:
        return len(self.tokens)


def _ids(name: str, given: Any, *, check_values: bool = True) -> NDArray[np.int32]:
    """The ids as a contiguous array of int32."""
    given = check_array(name, given)
    if given.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got {given.ndim} dimensions")
    if given.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name} must be int32 or int64, got {given.dtype}")
    if len(given) > MOST_TOKENS:
        raise ValueError(f"{name} must hold at most {MOST_TOKENS} ids, got {len(given)}")
    if check_values and len(given):
        for value in (given.min(), given.max()):
            if not 0 <= value < 2**31:
                raise ValueError(f"{name} must hold ids in [0, 2^31), got {value}")
    return np.ascontiguousarray(given, dtype=np.int32)
