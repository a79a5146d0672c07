"""Specification of `ngram_propose`: drafts copied from a sequence's own text.

The *ending* of a text is its last n tokens, a *match* an earlier place with the same n tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_propose(
    history: Tensor, lengths: Tensor, gamma: int, max_ngram: int, min_ngram: int
) -> tuple[Tensor, Tensor]:
    """The tokens that followed the latest of the longest matches, and their number."""
    b, columns = history.shape
    tokens = history.new_full((b, gamma), -1)
    counts = history.new_zeros((b,), dtype=torch.int32)
    for i, length in enumerate(lengths.tolist()):
        text = history[i, : length if 0 <= length <= columns else 0].tolist()
        start = _after_the_match(text, max_ngram, min_ngram)
        if start is not None:
            for k in range(gamma):
                text.append(text[start + k])
                tokens[i, k] = text[-1]
            counts[i] = gamma
    return tokens, counts


def _after_the_match(text: list[int], max_ngram: int, min_ngram: int) -> int | None:
    """Index of the token that followed the latest of the longest matches; None without one."""
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return start + n
    return None
