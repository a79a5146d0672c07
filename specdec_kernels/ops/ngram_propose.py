"""Drafts that are copied from a sequence's own text: prompt lookup for a whole batch.

The *history* of a sequence is the tokens that it has so far, its *ending* the last n of them, and a
*match* an earlier place with the same n tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.validation import fake_kernel


class NgramDraft(NamedTuple):
    """The result of `ngram_propose`: a deterministic draft, which has no distribution.

    Attributes:
        tokens: [B, gamma] of the dtype of the history, -1 where nothing is drafted.
        counts: [B] int32, drafted tokens: gamma, or 0 where the ending has no match.
    """

    tokens: Tensor
    counts: Tensor


def ngram_propose(
    history: Tensor, lengths: Tensor, *, gamma: int, max_ngram: int = 4, min_ngram: int = 2
) -> NgramDraft:
    """Draft the tokens that followed the latest of the longest matches of each ending.

    The longest n in [min_ngram, max_ngram] whose ending has a match is taken, and of its matches
    the latest. A match may overlap the ending. Where the copy reaches the end of the text it goes
    on from its own beginning, so the text repeats with that period; every draft has gamma tokens.
    Nothing is read on the host, and a draft does not depend on other sequences.

    Args:
        history: [B, L] int32 or int64, any strides; L < 2**31. Sequence b has the tokens
            `history[b, :lengths[b]]`. Their values are compared and copied, and are never an
            index; they must be at least 0, because a copied -1 would read as no draft.
        lengths: [B] int32 or int64. A length outside [0, L] leaves its sequence without a draft.
        gamma: tokens of a draft; 0 drafts nothing.
        max_ngram: longest ending to look for.
        min_ngram: shortest ending that gives a draft, at least 1.

    Raises:
        RuntimeError: a shape, dtype, device or scalar is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of a tensor.

    Source: prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding);
    the copy beyond the end is that of LZ77 (Ziv and Lempel, 1977).

    >>> history = torch.tensor([[5, 6, 7, 5, 6], [1, 2, 3, 0, 0]])
    >>> ngram_propose(history, torch.tensor([5, 3]), gamma=4)
    NgramDraft(tokens=tensor([[ 7,  5,  6,  7],
            [-1, -1, -1, -1]]), counts=tensor([4, 0], dtype=torch.int32))
    """
    conversion.require_tensors(history=history, lengths=lengths)
    conversion.require_integer(gamma, "gamma")
    conversion.require_integer(max_ngram, "max_ngram")
    conversion.require_integer(min_ngram, "min_ngram")
    return NgramDraft(*ops.ngram_propose.default(history, lengths, gamma, max_ngram, min_ngram))


@fake_kernel("ngram_propose")
def _(
    history: Tensor, lengths: Tensor, gamma: int, max_ngram: int, min_ngram: int
) -> tuple[Tensor, Tensor]:
    b = history.shape[0]
    return history.new_empty((b, gamma)), history.new_empty((b,), dtype=torch.int32)
