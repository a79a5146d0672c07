"""Counts of the n-grams of a text, in sorted arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from specdec_hf.arguments import check_integer, shown
from specdec_hf.drafters.fingerprint import UNKNOWN

FORMAT = "specdec n-gram table 1"
MAX_ORDER = 8

Followers = tuple[NDArray[np.int64], NDArray[np.int64]]
NONE: Followers = (np.empty(0, np.int64), np.empty(0, np.int64))


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of an n-gram table, without its arrays.

    Raises:
        OSError: a file that cannot be read.
        ValueError: a file of another kind.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"path must name an n-gram table, got {path}: {error}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"path must name an n-gram table of format {FORMAT!r}, got {path} of format "
            f"{metadata.get('format')!r}"
        )
    return metadata


class NgramTable:
    """Counts of the n-grams of a text, as a trie of sorted arrays.

    Level k holds the different k-grams, sorted by the row of their first k - 1 tokens in level
    k - 1 and then by their last token. Those that extend row r of level k - 1 are the rows
    ``begins[k-1][r]`` to ``begins[k-1][r+1]`` of level k. A k-gram takes 16 bytes.

    Attributes:
        vocab_size: ids are below it.
        tokens: of each level, [M_k] int32, the last token of each k-gram.
        counts: of each level, [M_k] int32, how often each k-gram occurs.
        begins: of each level, [M_(k-1) + 1] int64; the empty n-gram is the one row of level 0.
        fingerprint: 32 bytes that another tokenizer does not have; zeros where it is not known.
    """

    def __init__(
        self,
        vocab_size: int,
        tokens: Sequence[NDArray[np.int32]],
        counts: Sequence[NDArray[np.int32]],
        begins: Sequence[NDArray[np.int64]],
        *,
        fingerprint: bytes = UNKNOWN,
    ) -> None:
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.tokens, self.counts, self.begins = list(tokens), list(counts), list(begins)

    @property
    def order(self) -> int:
        """Tokens of the longest n-grams."""
        return len(self.tokens)

    @classmethod
    def build(
        cls,
        texts: Iterable[NDArray[np.int64]],
        vocab_size: int,
        order: int,
        min_count: int = 1,
        *,
        fingerprint: bytes = UNKNOWN,
    ) -> NgramTable:
        """Count the n-grams of texts; none reaches from one text into the next.

        Args:
            texts: ids, each one-dimensional.
            vocab_size: ids must be below it.
            order: tokens of the longest n-grams, from 1 to 8.
            min_count: rarer n-grams are left out, and with them those that they begin.
            fingerprint: of the tokenizer that made the ids, see `fingerprint_of`.

        Raises:
            TypeError: a size, order or count that is no integer, or a fingerprint of no bytes.
            ValueError: one of these out of range, ids outside the vocabulary, no text, or a
                fingerprint of another length.
        """
        vocab_size = check_integer("vocab_size", vocab_size, 1)
        order = check_integer("order", order, 1, MAX_ORDER)
        min_count = check_integer("min_count", min_count, 1)
        if not isinstance(fingerprint, bytes):
            raise TypeError(f"fingerprint must be bytes, got {shown(fingerprint)}")
        if len(fingerprint) != len(UNKNOWN):
            raise ValueError(f"fingerprint must have 32 bytes, got {len(fingerprint)}")
        given = [np.asarray(text, dtype=np.int64) for text in texts]
        stream = np.concatenate([*given, np.empty(0, np.int64)])
        if not len(stream):
            raise ValueError("texts must hold at least one token, got none")
        if stream.min() < 0 or stream.max() >= vocab_size:
            wrong = stream.min() if stream.min() < 0 else stream.max()
            raise ValueError(f"texts must hold ids in [0, {vocab_size}), got {wrong}")
        ends = np.repeat(np.cumsum([len(text) for text in given]), [len(text) for text in given])
        levels: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]] = []
        # The (k-1)-grams that occur often enough: where each begins, and its row in level k - 1.
        starts, rows, size = np.arange(len(stream)), np.zeros(len(stream), dtype=np.int64), 1
        for k in range(1, order + 1):
            inside = starts + k <= ends[starts]
            starts, rows = starts[inside], rows[inside]
            keys, inverse, counts = np.unique(
                rows * vocab_size + stream[starts + k - 1], return_inverse=True, return_counts=True
            )
            kept = counts >= min_count
            number = np.cumsum(kept) - 1
            starts, inverse = starts[kept[inverse]], inverse[kept[inverse]]
            keys, rows = keys[kept], number[inverse]
            begins = np.searchsorted(keys // vocab_size, np.arange(size + 1))
            levels.append(
                ((keys % vocab_size).astype(np.int32), counts[kept].astype(np.int32), begins)
            )
            size = len(keys)
        return cls(vocab_size, *zip(*levels, strict=True), fingerprint=fingerprint)

    def followers(self, context: Sequence[int]) -> Followers:
        """The tokens that follow ``context`` in the text, and how often each does."""
        if len(context) >= self.order:
            return NONE
        first, last = 0, len(self.tokens[0])
        for k, token in enumerate(context, start=1):
            row = first + int(np.searchsorted(self.tokens[k - 1][first:last], token))
            if row == last or self.tokens[k - 1][row] != token:
                return NONE
            first, last = self.begins[k][row : row + 2].tolist()
        level = len(context)
        found = slice(first, last)
        return (
            self.tokens[level][found].astype(np.int64),
            self.counts[level][found].astype(np.int64),
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        # Tables of earlier versions lack it.
        arrays: dict[str, NDArray[Any]] = {
            "fingerprint": np.frombuffer(self.fingerprint, dtype=np.uint8)
        }
        for k in range(self.order):
            arrays[f"tokens.{k}"] = self.tokens[k]
            arrays[f"counts.{k}"] = self.counts[k]
            arrays[f"begins.{k}"] = self.begins[k]
        metadata = {
            "format": FORMAT, "vocab_size": str(self.vocab_size), "order": str(self.order)
        }  # fmt: skip
        Path(path).write_bytes(save(arrays, metadata=metadata))

    @classmethod
    def load(cls, path: str | Path) -> NgramTable:
        """Read what `save` wrote.

        Raises:
            OSError: a file that cannot be read.
            ValueError: a file of another kind.
        """
        metadata = read_metadata(path)
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            table = cls(
                int(metadata["vocab_size"]),
                *(
                    [arrays[f"{kind}.{k}"] for k in range(int(metadata["order"]))]
                    for kind in ("tokens", "counts", "begins")
                ),
                fingerprint=arrays["fingerprint"].tobytes() if "fingerprint" in arrays else UNKNOWN,
            )
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"path must name an n-gram table, got {path}: {error}") from None
        if not table._valid():
            raise ValueError(f"path must name a valid n-gram table, got {path}, which is damaged")
        return table

    def _valid(self) -> bool:
        """Whether every number that `followers` follows is in range."""
        if len(self.fingerprint) != len(UNKNOWN):
            return False
        size = 1
        for tokens, counts, begins in zip(self.tokens, self.counts, self.begins, strict=True):
            kinds = [array.dtype.name for array in (tokens, counts, begins)]
            if kinds != ["int32", "int32", "int64"]:
                return False
            if tokens.shape != counts.shape or tokens.ndim != 1 or begins.shape != (size + 1,):
                return False
            if begins[0] != 0 or begins[-1] != len(tokens) or (np.diff(begins) < 0).any():
                return False
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
                return False
            if len(counts) and counts.min() < 1:
                return False
            size = len(tokens)
        return 1 <= self.order <= MAX_ORDER


class NgramCounts:
    """Counts of the tokens that followed each n-gram, in dictionaries.

    The ending of a text is its last n tokens, as in copying.py.

    Args:
        max_ngram, min_ngram: longest and shortest n-gram that is stored. The empty one, 0, is
            followed by every token.
        earlier: counts of earlier texts, which are added to these where they are read.

    Example:
        >>> counts = NgramCounts(max_ngram=2, min_ngram=1)
        >>> counts.extend(np.array([5, 6, 7, 5, 6]))
        >>> counts.add([5, 6], [8, 7])
        >>> counts.ranking([5, 6]), counts.ranking([4, 6]), counts.ranking([4])
        ([7, 8], [7, 8], [])
    """

    def __init__(self, max_ngram: int, min_ngram: int, earlier: NgramCounts | None = None) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._earlier = earlier
        self._length = 0  # of the text that was counted
        # n-gram -> counts of the tokens after it, the one that was counted last at the end
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}

    def __len__(self) -> int:
        """Number of n-grams, those of earlier texts aside."""
        return len(self._counts)

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

    def with_latest(self, texts: Iterable[NgramCounts], max_ngrams: int) -> NgramCounts:
        """These counts and those of texts that have ended; these themselves are not changed.

        After each text only the latest n-grams are kept.
        """
        made = NgramCounts(self._sizes.start, self._sizes.stop + 1)
        kept = made._counts = self._counts.copy()
        for text in texts:
            for ngram, followers in text._counts.items():
                kept[ngram] = _sum(kept.pop(ngram, {}).copy(), followers)
            for ngram in list(kept)[: max(0, len(kept) - max_ngrams)]:
                del kept[ngram]
        return made

    def followers(self, ngram: Sequence[int]) -> Followers:
        """The tokens that followed an n-gram, and how often each did."""
        counts = self._after(tuple(ngram))
        if not counts:
            return NONE
        return np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64)

    def ranking(self, text: Sequence[int]) -> list[int]:
        """All tokens after the endings of ``text``, best first.

        Those after longer endings come first; after one ending, those with larger counts do. Of
        equal counts, the one that was reached first comes first.
        """
        ranked: dict[int, None] = {}
        for ngram in self._endings(text):
            counts = self._after(ngram)
            ranked.update(dict.fromkeys(sorted(counts, key=lambda token: -counts[token])))
        return list(ranked)

    def best(self, text: Sequence[int]) -> int | None:
        """The first token of `ranking`; None if no ending is stored."""
        for ngram in self._endings(text):
            if counts := self._after(ngram):
                return max(counts, key=lambda token: counts[token])
        return None

    def continuation(
        self, text: Sequence[int], count: int, guess: Callable[[int], int] | None = None
    ) -> list[int]:
        """The ``count`` tokens that follow, each the best one; fewer where none is known.

        ``guess`` gives the token of an index where none is known, so that there are not fewer.
        """
        grown = list(text)
        while (index := len(grown) - len(text)) < count:
            token = self.best(grown)
            if token is None:
                if guess is None:
                    break
                token = guess(index)
            grown.append(token)
        return grown[len(text) :]

    def _after(self, ngram: tuple[int, ...]) -> dict[int, int]:
        """Counts of the tokens after an n-gram."""
        counts = self._counts.get(ngram, {})
        if self._earlier is None:
            return counts
        return _sum(self._earlier._after(ngram).copy(), counts)

    def _endings(self, text: Sequence[int]) -> Iterable[tuple[int, ...]]:
        length = len(text)
        return (tuple(text[length - size :]) for size in self._sizes if size <= length)


def _sum(counts: dict[int, int], later: dict[int, int]) -> dict[int, int]:
    """``counts`` with others added, the tokens of which are then the ones counted last."""
    for token, number in later.items():
        counts[token] = counts.pop(token, 0) + number
    return counts
