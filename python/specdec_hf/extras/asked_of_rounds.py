"""Answers about a round: the likeliest tokens and the rejections for drafters, and for callers
`Step.top_logprobs`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.context import Candidates
from specdec_hf.drafting.drafter import Rejections
from specdec_hf.loop.commit import DraftCounts, Taken
from specdec_hf.loop.drafted import DraftedRound
from specdec_hf.loop.session import Session
from specdec_hf.runner.protocol import to_device


def observed(
    session: Session, drafted: DraftedRound, logits: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The integers that `Candidates` is made of, on the device; empty where nobody asks."""
    assert session.drafter is not None
    count = session.drafter.needs.candidates
    if count == 0:
        return {}
    ids = logits.topk(min(count, logits.shape[-1]), dim=-1).indices
    return {**drafted.layout._asdict(), "candidates": ids.flatten(1)}


def candidates(session: Session, read: Mapping[str, NDArray[np.int64]]) -> Candidates:
    """What `observed` gave, once it is on the host."""
    tokens = np.concatenate([session.history.last(1), read["tokens"]], axis=1)
    above = np.concatenate([np.full_like(tokens[:, :1], -1), read["parents"] + 1], axis=1)
    return Candidates(tokens, above, read["candidates"].reshape(*tokens.shape, -1))


def rejections(
    session: Session,
    drafted: DraftedRound,
    taken: Taken,
    counts: DraftCounts,
    logits: torch.Tensor,
) -> Rejections | None:
    """The target's logits where a draft was rejected; None where none was, or nobody asks."""
    assert session.drafter is not None
    kept = taken.num_accepted
    rejected = np.flatnonzero(drafted.active & (counts.tried > kept))
    if len(rejected) == 0 or not session.drafter.needs.rejections:
        return None
    at = drafted.rows(taken)[rejected, kept[rejected]]
    found = logits[to_device(rejected, logits.device), to_device(at, logits.device)]
    return Rejections(rejected, drafted.lengths[rejected] + kept[rejected], found)


def likeliest(
    session: Session, drafted: DraftedRound, taken: Taken, logits: torch.Tensor
) -> dict[int, list[dict[int, float]]]:
    """`Step.top_logprobs` of the sequences for which somebody asks, from logits [B, N+1, V]."""
    made: dict[int, list[dict[int, float]]] = {}
    for b in np.flatnonzero(session.history.active).tolist():
        call, index = session.sequences.calls[b]
        asked = call.output.num_top_logprobs
        count = asked[index] if asked else None
        if count is None:
            continue
        tokens = taken.tokens[b]
        chosen = drafted.rows(taken)[b, : len(tokens)].tolist()
        rows = logits[b, chosen].float().log_softmax(dim=-1)
        top = rows.topk(min(count, rows.shape[-1]), dim=-1)
        made[b] = []
        for i, token in enumerate(tokens):
            pairs = zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True)
            made[b].append({token: float(rows[i, token]), **dict(pairs)})
    return made
