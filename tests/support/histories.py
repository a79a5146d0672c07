"""Committed tokens, as the loop shows them to a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from specdec_hf import Draft, Drafter, History


def history_of(*texts: Sequence[int], active: Sequence[bool] | None = None) -> History:
    """The texts of one round; all sequences go on unless ``active`` says otherwise."""
    lengths = np.array([len(text) for text in texts])
    tokens = np.zeros((len(texts), lengths.max() + 5), dtype=np.int64)
    for b, text in enumerate(texts):
        tokens[b, : len(text)] = text
    return History(tokens, lengths, np.array([True] * len(texts) if active is None else active))


def limits_of(history: History, limit: int) -> NDArray[np.int64]:
    """The same limit for every sequence that goes on."""
    return np.where(history.active, limit, 0)


def chains_of(draft: Draft | None) -> list[list[list[int]]] | None:
    """Tokens [B, K, L] of the proposals of a draft."""
    if draft is None:
        return None
    chains: list[list[list[int]]] = draft.tokens.unflatten(1, (draft.num_proposals, -1)).tolist()
    return chains


def propose(drafter: Drafter, history: History, limit: int) -> Draft | None:
    """What a drafter that was started drafts."""
    draft: Draft | None = drafter.propose(history, limits_of(history, limit))
    return draft


def counts_of(draft: Draft) -> list[int]:
    """[B], tokens of each sequence."""
    counts: list[int] = (draft.tokens >= 0).sum(dim=1).tolist()
    return counts
