"""What a drafter is told: a call, and committed tokens, as the loop shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf import Draft, DraftContext, Drafter, History
from support.hf_models import tiny


class Context:
    """All that drafters which copy texts read of a call with two sequences."""

    batch_size = 2
    rule = "greedy"
    model = tiny("llama")
    max_length = 40
    encoder = None
    num_proposals = 1

    def note(self, text: str) -> None:
        """Remarks are of no interest here."""

    def sampled_seeds(self) -> dict[int, int]:
        """Texts are greedy."""
        return {}


class SeveralProposals(Context):
    """A call that takes three chains."""

    num_proposals = 3


def context_of(
    model: Any, rule: str = "greedy", batch_size: int = 1, **fields: Any
) -> DraftContext:
    """A call without filters, of temperature 0 where it is greedy; ``fields`` are others of it."""
    given = {
        "temperature": float(rule != "greedy"), "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "seeds": torch.zeros(batch_size, dtype=torch.int64), "max_length": 99, "max_draft": 16,
    }  # fmt: skip
    return DraftContext(model, rule, batch_size=batch_size, **{**given, **fields})


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
