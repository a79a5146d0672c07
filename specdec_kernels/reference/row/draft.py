"""P of a target row and Q of a draft row, in float64; what all rules read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels.reference.row.distribution import Distribution, Shaping, finite


@dataclass
class Row:
    """P of one target row: probabilities [V] and their logarithms, or a fault."""

    p: Tensor
    lp: Tensor
    fault: bool = False


@dataclass
class Draft:
    """Q of one draft row, on the target's vocabulary [V]; `q_x` of the drafted token.

    fault: seen where the drafted token is looked up. whole: nothing wrong anywhere in the row.
    beyond: mass on what the target's vocabulary does not hold.
    """

    q: Tensor
    q_x: float
    fault: bool = False
    whole: bool = True
    beyond: float = 0.0


def target_row(row: Tensor, kind: str, shaping: Shaping, direct: bool) -> Row:
    """P of a row [V] float64. A `direct` row of probabilities is the law as it is."""
    if kind == "probs":
        fault = not bool(row.isfinite().all() and (row >= 0).all() and row.sum() > 0)
        if fault or direct:
            return Row(row, row.log(), fault)
        row = row.log()
    elif not finite(row):
        return Row(row, row, True)
    law = Distribution(row, *shaping)
    return Row(law.probs, law.logprobs)


def entry(weights: Tensor, x: int) -> float:
    """Of a token that the target may not have."""
    return float(weights[x]) if x < len(weights) else 0.0


def point_mass(certain: int, x: int, v: int) -> Draft:
    """Q of a token that was certain, at the token x."""
    q = torch.zeros(v, dtype=torch.float64)
    if certain < v:
        q[certain] = 1.0
    return Draft(q, float(x == certain), beyond=float(certain >= v))


def sparse_row(probs: Tensor, ids: Tensor, x: int, v: int) -> Draft:
    """Q of a few ids [K] with their probabilities."""
    q = torch.zeros(v, dtype=torch.float64)
    fault = not bool((probs.isfinite() & (probs >= 0))[ids >= 0].all())
    inside = (ids >= 0) & (ids < v)
    q.index_add_(0, ids[inside], probs[inside])
    return Draft(q, float(q[x]), fault, beyond=float(probs[ids >= v].sum()))


def draft_row(
    row: Tensor,
    x: int,
    v: int,
    kind: str,
    left: tuple[float, float] | None,
    columns: Tensor | None,
    temperature: float,
) -> Draft:
    """Q of a row [D]; left: logsumexp and threshold that `sample` left behind."""
    q = torch.zeros(v, dtype=torch.float64)
    fault, whole = False, finite(row)
    column = x if columns is None else int(columns[x])
    inside_row = 0 <= column < len(row)
    if left is not None:
        total, bound = left
        fault = not math.isfinite(total) or math.isnan(bound)
        fault |= inside_row and not float(row[column]) < math.inf
        law = torch.where(row >= bound, (row / temperature - total).exp(), 0.0)
    elif kind == "probs":
        whole = bool((row.isfinite() & (row >= 0)).all())
        fault = inside_row and not 0 <= float(row[column]) < math.inf
        law = row
    else:
        fault = not whole
        law = row if fault else Distribution(row, temperature, 0, 1.0, 0.0).probs
    beyond = float(law[v:].sum()) if columns is None else 0.0
    columns = torch.arange(v) if columns is None else columns.long()
    known = (columns >= 0) & (columns < len(row))
    q[known] = law[columns[known]]
    return Draft(q, float(law[column]) if inside_row else 0.0, fault, whole, beyond)
