"""A text that does not change, searched through its suffix array."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specdec_host import _library, corpus_file
from specdec_host.arguments.arrays import Array, require_array
from specdec_host.arguments.checks import (
    MAX_MATCH,
    check_chains,
    check_integer,
    check_probability,
)
from specdec_host.corpus_file import CorpusFile
from specdec_host.proposal import Proposal

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_TOKENS = 2**31 - 1


class Corpus:
    """A text with its suffix array: 8 bytes a token, in memory or mapped from a file.

    Any number of automata and threads may read one corpus at once.

    Args:
        tokens: [n] int32 or int64, ids in [0, 2^31). They are copied unless they are int32 and
            contiguous; then they must not change afterwards.
        suffixes: [n] int32, the suffix array of the tokens; None builds it.
        progress: called with the finished part of the building, from 0 to 1.

    Attributes:
        vocab_size: ids are smaller than this; None where it is not known.
        fingerprint: 32 bytes that another tokenizer does not have; zeros where it is not known.

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
        tokens: Array,
        suffixes: Array | None = None,
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
        self.vocab_size: int | None = None
        self.fingerprint = bytes(32)
        self.native = _library.Corpus(self.tokens, self.suffixes)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map a file that `save` wrote. Its pages are read when they are needed first.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is of another kind or version, or truncated.
        """
        if sys.byteorder != "little":
            raise ValueError("a corpus can be mapped on little-endian machines only")
        content = corpus_file.map_file(path)
        corpus = cls.__new__(cls)
        corpus.tokens, corpus.suffixes = np.asarray(content.tokens), np.asarray(content.suffixes)
        corpus.vocab_size, corpus.fingerprint = content.vocab_size, content.fingerprint
        corpus.native = _library.Corpus(corpus.tokens, corpus.suffixes)
        return corpus

    def save(self, path: str | Path, *, vocab_size: int, fingerprint: bytes = bytes(32)) -> None:
        """Write a file for `open`.

        Args:
            path: where to; a file that is there is replaced.
            vocab_size: of the model that the tokens are for.
            fingerprint: 32 bytes that another tokenizer does not have, such as a SHA-256 digest.

        Raises:
            OSError: the file cannot be written.
            ValueError: no tokens, an id outside of the vocabulary, or a fingerprint of another
                length.
        """
        vocab_size = check_integer("vocab_size", vocab_size, 1, 2**31)
        if len(fingerprint) != 32:
            raise ValueError(f"fingerprint must have 32 bytes, got {len(fingerprint)}")
        if not len(self.tokens):
            raise ValueError("tokens must hold at least 1 id, got 0")
        if self.tokens.max() >= vocab_size:
            raise ValueError(
                f"tokens must hold ids in [0, vocab_size) = [0, {vocab_size}), "
                f"got {self.tokens.max()}"
            )
        corpus_file.write(path, CorpusFile(self.tokens, self.suffixes, vocab_size, fingerprint))

    def propose(
        self,
        context: Array,
        gamma: int,
        *,
        count: int = 1,
        min_match: int = 1,
        max_match: int = 32,
        min_confidence: float = 0.0,
    ) -> Proposal:
        """Draft the tokens that may follow the end of a text.

        The longest end of the context that occurs in the corpus is searched. Of its continuations
        the most frequent come first, of equally frequent ones that with the lowest id. After more
        than 64 matches, continuations that are rarer than one in 64 may be left out.

        Args:
            context: [n] int32 or int64, ids in [0, 2^31).
            gamma: most tokens of a chain, within which several chains differ. So ask for each text
                with its own: others may be among the chains of a smaller one.
            count: most chains. They differ, and the first is the one that ``count=1`` gives. Others
                branch off where their estimated probability is highest.
            min_match, max_match: fewest and most tokens of a match.
            min_confidence: a chain ends before the product of its confidences falls below this.

        Raises:
            TypeError: an argument of a wrong type.
            ValueError: an argument out of range.
        """
        gamma, count = check_chains(gamma, count)
        max_match = check_integer("max_match", max_match, 1, MAX_MATCH)
        min_match = check_integer("min_match", min_match, 1, max_match)
        context = require_array(context, "context")
        min_confidence = check_probability("min_confidence", min_confidence)
        return Proposal(
            *self.native.propose(context, gamma, count, min_match, max_match, min_confidence)
        )

    def count(self, ngram: Array) -> int:
        """How often an n-gram occurs.

        Args:
            ngram: [n] int32 or int64, ids in [0, 2^31). Overlapping occurrences count.
        """
        return self.native.count(require_array(ngram, "ngram"))

    def __len__(self) -> int:
        return len(self.tokens)


def _ids(name: str, ids: Any, *, check_values: bool = True) -> NDArray[np.int32]:
    """The ids as a contiguous and aligned array of int32."""
    ids = require_array(ids, name)
    if ids.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got {ids.ndim} dimensions")
    if ids.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name} must be int32 or int64, got {ids.dtype}")
    if len(ids) > MOST_TOKENS:
        raise ValueError(f"{name} must hold at most {MOST_TOKENS} ids, got {len(ids)}")
    if check_values and len(ids):
        for value in (ids.min(), ids.max()):
            if not 0 <= value < 2**31:
                raise ValueError(f"{name} must hold ids in [0, 2^31), got {value}")
    return np.require(ids, np.int32, ["C", "A"])
