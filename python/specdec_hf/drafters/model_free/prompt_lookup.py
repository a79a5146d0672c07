"""Prompt lookup: drafts are copied from where the last tokens of a sequence occurred before.

The ending of a sequence is its last n tokens. A match is an earlier place with the same n tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer
from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.drafter import Draft, Drafter
from specdec_hf.drafters.model_free.copied_text import CopiedText


class PromptLookupDrafter(Drafter, entry="prompt_lookup"):
    """Copies the tokens that followed the latest of the longest matches of a sequence's ending.

    It runs on the host, where the loop holds all tokens, and treats every sequence by itself. With
    an encoder-decoder it also looks at what the encoder read, which summaries and translations copy
    from, as if that preceded the decoder's text.

    Args:
        max_ngram: longest ending to look for.
        min_ngram: shortest ending that gives a draft.

    Raises:
        TypeError: a length that is not an integer.
        ValueError: not 1 <= min_ngram <= max_ngram.

    Source: prompt lookup decoding (Saxena, 2023).
    """

    rolls_back = True

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        self.max_ngram = check_integer("max_ngram", max_ngram)
        self.min_ngram = check_integer("min_ngram", min_ngram)
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram must be in [1, max_ngram = {max_ngram}], got {min_ngram}")
        self._text = CopiedText()

    def start(self, context: DraftContext) -> None:
        self._text, self._num_proposals = CopiedText(context), context.num_proposals

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        """Different continuations of every sequence."""
        count, gamma = self._num_proposals, int(limits.max())
        tokens = np.full((len(history.lengths), count, gamma), -1, dtype=np.int64)
        for b in np.flatnonzero(history.active).tolist():
            text = self._text.of(history, b)
            found = lookup_several(text, gamma, count, self.max_ngram, self.min_ngram)
            for k, continuation in enumerate(found):
                tokens[b, k] = continuation
        if (tokens < 0).all():
            return None
        return Draft(torch.from_numpy(tokens).flatten(1), num_proposals=count)


def lookup(
    tokens: NDArray[np.int64], gamma: int, max_ngram: int, min_ngram: int = 1
) -> NDArray[np.int64]:
    """The ``gamma`` tokens that followed the latest of the longest matches of the ending.

    Where the copy reaches the end of ``tokens`` it continues from its own beginning, as in LZ77:
    the text then repeats with that period. So all drafts have one length, which keeps the shapes of
    the batch.

    Args:
        tokens: [T] int64, the text.
        gamma: how many tokens to copy.
        max_ngram: longest ending to look for.
        min_ngram: fewest tokens of a match.

    Returns:
        [gamma] int64; [0] if no match has ``min_ngram`` tokens.

    Example:
        >>> import numpy as np
        >>> lookup(np.array([5, 6, 7, 5, 6]), gamma=4, max_ngram=2).tolist()
        [7, 5, 6, 7]
    """
    ends, sizes = _matches(tokens, max_ngram, min_ngram)
    if not len(ends):
        return tokens[:0]
    return _copied(tokens, ends[np.flatnonzero(sizes == sizes.max())[-1]], gamma)


def lookup_several(
    tokens: NDArray[np.int64], gamma: int, count: int, max_ngram: int, min_ngram: int = 1
) -> list[NDArray[np.int64]]:
    """Up to ``count`` different continuations as in `lookup`.

    Those of longer matches come first; among equally long matches, the latest.

    Args:
        tokens, gamma, max_ngram, min_ngram: as in `lookup`.
        count: most continuations.

    Returns:
        Arrays [gamma] int64, none where no match has ``min_ngram`` tokens.

    Example:
        >>> import numpy as np
        >>> tokens = np.array([5, 6, 7, 5, 6, 8, 5, 6])
        >>> [found.tolist() for found in lookup_several(tokens, 2, 3, max_ngram=2)]
        [[8, 5], [7, 5]]
    """
    ends, sizes = _matches(tokens, max_ngram, min_ngram)
    found: dict[tuple[int, ...], NDArray[np.int64]] = {}
    for end in ends[np.lexsort((-ends, -sizes))]:
        copied = _copied(tokens, end, gamma)
        found.setdefault(tuple(copied.tolist()), copied)
        if len(found) == count:
            break
    return list(found.values())


def _matches(
    tokens: NDArray[np.int64], max_ngram: int, min_ngram: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All matches of the ending: index of the last token of each, and its length."""
    length = len(tokens)
    # Candidates end where the last token occurred before. Each longer ending leaves fewer of them.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) if length > 1 else np.empty(0, np.int64)
    sizes = np.ones(len(ends), dtype=np.int64)
    longest = np.arange(len(ends))
    for size in range(1, min(max_ngram, length - 1)):
        longest = longest[ends[longest] >= size]
        longest = longest[tokens[ends[longest] - size] == tokens[length - 1 - size]]
        if not len(longest):
            break
        sizes[longest] = size + 1
    return ends[sizes >= min_ngram], sizes[sizes >= min_ngram]


def _copied(tokens: NDArray[np.int64], end: int, gamma: int) -> NDArray[np.int64]:
    start = int(end) + 1
    return tokens[start + np.arange(gamma) % (len(tokens) - start)]
