"""Q, the distribution that a drafted token was drawn from, in float64.

A draft comes as a full row (logits or probabilities), as a row with the statistics that `sample`
returned when it drew the token, as a few ids with their probabilities (sparse), or without any
distribution: then the token counts as certain, and Q is *one-hot*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .distribution import Distribution, valid_logits


@dataclass
class DraftDistribution:
    """Q of one draft row over the target's vocabulary: `probs` [V].

    token_prob: probability of the drafted token, which the target's vocabulary may lack.
    mass_beyond: probability of all ids that the target's vocabulary lacks.
    valid_at_token: all that is read to accept or reject the drafted token is valid.
    valid: the whole row is valid; the residual needs all of it.
    """

    probs: Tensor
    token_prob: float
    mass_beyond: float = 0.0
    valid_at_token: bool = True
    valid: bool = True


def invalid_draft(v: int) -> DraftDistribution:
    return DraftDistribution(torch.zeros(v), 0.0, valid_at_token=False, valid=False)


def one_hot_draft(certain: int, token: int, v: int) -> DraftDistribution:
    """Q with all its mass on `certain`, and its probability of `token`."""
    probs = torch.zeros(v, dtype=torch.float64)
    if certain < v:
        probs[certain] = 1.0
    return DraftDistribution(probs, float(token == certain), mass_beyond=float(certain >= v))


def sparse_draft(row: Tensor, ids: Tensor, token: int, v: int) -> DraftDistribution:
    """Q of a few ids [K] with their probabilities; an id may occur twice, -1 is unused."""
    probs = torch.zeros(v, dtype=torch.float64)
    valid = bool((row.isfinite() & (row >= 0))[ids >= 0].all())
    inside = (ids >= 0) & (ids < v)
    probs.index_add_(0, ids[inside], row[inside])
    mass_beyond = float(row[ids >= v].sum())
    return DraftDistribution(probs, float(probs[token]), mass_beyond, valid, valid)


def dense_draft(
    row: Tensor,
    token: int,
    v: int,
    kind: str,
    statistics: tuple[float, float] | None,
    columns: Tensor | None,
    temperature: float,
) -> DraftDistribution:
    """Q of a row [D].

    statistics: (logsumexp, threshold) that `sample` returned for a row of logits.
    columns: [V], the column of each id of the target's vocabulary, -1 for none; None if id and
        column are the same.
    """
    column = token if columns is None else int(columns[token])
    in_row = 0 <= column < len(row)
    if statistics is not None:
        logsumexp, bound = statistics
        valid = valid_logits(row)
        valid_at_token = math.isfinite(logsumexp) and not math.isnan(bound)
        valid_at_token &= not in_row or float(row[column]) < math.inf
        q = torch.where(row >= bound, (row / temperature - logsumexp).exp(), 0.0)
    elif kind == "probs":
        valid = bool((row.isfinite() & (row >= 0)).all())
        valid_at_token = not in_row or 0 <= float(row[column]) < math.inf
        q = row
    else:
        valid = valid_at_token = valid_logits(row)
        q = Distribution(row, temperature, 0, 1.0, 0.0).probs if valid else row
    mass_beyond = float(q[v:].sum()) if columns is None else 0.0
    columns = torch.arange(v) if columns is None else columns.long()
    known = (columns >= 0) & (columns < len(row))
    probs = torch.zeros(v, dtype=torch.float64)
    probs[known] = q[columns[known]]
    token_prob = float(q[column]) if in_row else 0.0
    return DraftDistribution(
        probs, token_prob, mass_beyond, valid_at_token, valid and valid_at_token
    )
