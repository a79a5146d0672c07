"""P, the distribution that one row of logits or probabilities gives, in float64.

A *row* is one vector over the vocabulary. *Sampling parameters* are temperature, top-k, top-p and
min-p, applied in this order. A row is *valid* if it holds a distribution: logits may be -inf, but
not all of them, and neither NaN nor +inf; probabilities are finite, not negative, not all zero.
See docs/rules.md#sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...arguments.checks import float32
from ...arguments.sample import SamplingArguments
from .filter import threshold


class SequenceParams(NamedTuple):
    """The sampling parameters of one sequence or row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, sampling: SamplingArguments, b: int) -> SequenceParams:
        s = sampling
        return cls(
            value_at(s.temperatures, s.temperature, b),
            s.top_k if s.top_ks is None else int(s.top_ks[b]),
            value_at(s.top_ps, s.top_p, b),
            value_at(s.min_ps, s.min_p, b),
        )

    @property
    def in_range(self) -> bool:
        return (
            math.isfinite(self.temperature)
            and self.temperature >= 0
            and self.top_k >= 0
            and 0 < self.top_p <= 1
            and 0 <= self.min_p <= 1
        )


GREEDY = SequenceParams(0.0, 0, 1.0, 0.0)


def value_at(tensor: Tensor | None, scalar: float, b: int) -> float:
    """Entry b of a tensor, or the scalar given for all entries, rounded to float32.

    Scalars reach the kernels as float32, so a scalar and a tensor filled with it agree.
    """
    return float32(scalar) if tensor is None else float(tensor[b])


class Distribution:
    """P of one row of logits: `probs` and `logprobs` [V] float64; one-hot at temperature 0.

    `logsumexp` (of logits / temperature) and `threshold` are over the survivors of the filters.
    """

    def __init__(
        self, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> None:
        top = float(logits.max())
        if temperature == 0:
            self.threshold, self.logsumexp = top, 0.0
            self.logprobs = torch.full_like(logits, -math.inf)
            self.logprobs[int(logits.argmax())] = 0.0
        else:
            self.threshold = threshold(logits, temperature, top_k, top_p, min_p)
            # Relative to the maximum: beside logits of 3e38 the log of a count would be lost.
            above = torch.where(logits >= self.threshold, (logits - top) / temperature, -math.inf)
            total = float(above.logsumexp(0))
            self.logsumexp = top / temperature + total
            self.logprobs = above - total
        self.probs = self.logprobs.exp()


@dataclass
class TargetRow:
    """P of one target row; without meaning unless `valid`."""

    probs: Tensor
    logprobs: Tensor
    valid: bool = True


def target_row(row: Tensor, kind: str, params: SequenceParams, direct: bool) -> TargetRow:
    """P of a target row [V] float64. `direct` takes a row of probabilities as it is."""
    if kind == "probs":
        valid = bool(row.isfinite().all() and (row >= 0).all() and row.sum() > 0)
        if direct or not valid:
            return TargetRow(row, row.log(), valid)
        row = row.log()
    elif not valid_logits(row):
        return TargetRow(row, row, valid=False)
    distribution = Distribution(row, *params)
    return TargetRow(distribution.probs, distribution.logprobs)


def masked(row: Tensor, bitmask: Tensor | None, rest: float) -> Tensor:
    """A row [V] float64 with `rest` at the tokens that a bitmask [ceil(V/32)] does not allow."""
    return row if bitmask is None else row.where(allowed(bitmask, len(row)), rest)


def allowed(bitmask: Tensor, v: int) -> Tensor:
    """[V] bool."""
    return (bitmask[:, None] >> torch.arange(32) & 1).flatten()[:v] == 1


def valid_logits(row: Tensor) -> bool:
    return not bool(row.isnan().any()) and math.isfinite(float(row.max()))


def prob_of(probs: Tensor, token: int) -> float:
    """Probability of a token; 0 where the vocabulary does not reach so far."""
    return float(probs[token]) if token < len(probs) else 0.0
