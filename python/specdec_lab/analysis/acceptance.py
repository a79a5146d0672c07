"""What is measured of a drafter at the positions of `replay`: acceptance by every formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.analysis import (
    LENIENCES,
    acceptance_rate,
    clustered_mean,
    divergence,
    lenient_argmax,
    rejection_acceptance,
    tree_acceptance,
)
from specdec_lab.analysis.replay import Position

FIRST = 5  # children in SpecInfer's table
Estimate = tuple[float, float]  # a mean and its standard error; NaN where it is unknown


@dataclass
class MeasuredAcceptance:
    """The acceptance probabilities of one drafter, gathered position by position.

    Attributes:
        lenience: the values l whose acceptance `sum(min(P / l, Q))` is gathered; the first is 1,
            the lossless rule.
        greedy: whether the temperature is 0, where a lenience compares probabilities before the
            argmax (Appendix A.5).
        texts: one list for each text, of [len(lenience)] float64 for each position with a draft.
            Under a tree it is the probability that one of the root's children is accepted, and NaN
            for values of the lenience below 1.
        divergences, rejections: the same lists of D_LK (Definition 3.2), and of the acceptance of
            rejection sampling (Appendix A.2), for chains.
        first: the same of [`FIRST`] float64: the probability that one of the first k children is
            accepted, k = 1, 2, ... They are those of a tree, or tokens of the draft distribution of
            a chain: the k likeliest at temperature 0, else k drawn independently, which rule
            multi_draft verifies.
        positions: all positions, those without a draft included.
    """

    lenience: Sequence[float] = LENIENCES
    greedy: bool = False
    texts: list[list[Tensor]] = field(default_factory=list)
    divergences: list[list[Tensor]] = field(default_factory=list)
    rejections: list[list[Tensor]] = field(default_factory=list)
    first: list[list[Tensor]] = field(default_factory=list)
    positions: int = 0

    def begin_text(self) -> None:
        """The positions that follow belong to a new text."""
        for lists in (self.texts, self.divergences, self.rejections, self.first):
            lists.append([])

    def add(self, position: Position) -> None:
        """Gather one position of the current text."""
        self.positions += 1
        p, q = position.p, position.q
        if position.children:
            accepted = p[position.children].cumsum(0)
            rates = torch.full((len(self.lenience),), math.nan, dtype=torch.float64)
            rates[0] = accepted[-1]
            self.texts[-1].append(rates)
            # Where a tree has fewer children than k, the first k are all of them.
            last = torch.arange(FIRST).clamp(max=len(accepted) - 1)
            self.first[-1].append(accepted.cpu()[last])
        elif q is not None:
            self.texts[-1].append(self._rates(position, q))
            self.divergences[-1].append(divergence(p, q))
            self.rejections[-1].append(rejection_acceptance(p, q))
            first = self._first(position, q)
            if first is not None:
                self.first[-1].append(first)

    def _rates(self, position: Position, q: Tensor) -> Tensor:
        """[len(lenience)], the acceptance of a chain under each lenience."""
        p = position.p
        if not self.greedy:
            rates = [acceptance_rate(p, q, "lenient", lenience=l) for l in self.lenience]
            return torch.stack(rates)
        before, drafted = position.logits.double().softmax(-1), q.argmax(-1)
        # The first of several equal maxima is the argmax, so that l = 1 is the lossless rule.
        lenient = [lenient_argmax(before, drafted, l).double() for l in self.lenience[1:]]
        return torch.stack([acceptance_rate(p, q), *lenient])

    def _first(self, position: Position, q: Tensor) -> Tensor | None:
        """[FIRST], for a chain with a draft distribution."""
        assert position.draft is not None
        drawn = position.draft.drawn
        if drawn is None:
            return None
        if self.greedy:
            row = drawn.logits[0, 0].cpu()
            likeliest = row.topk(min(FIRST, len(row))).indices
            found = (likeliest == position.p.argmax(-1).cpu()).cumsum(0).double()
            return torch.nn.functional.pad(found, (0, FIRST - len(found)), value=float(found[-1]))
        sizes = range(1, FIRST + 1)
        return torch.stack([tree_acceptance(position.p, q, k, "multi_draft") for k in sizes]).cpu()

    @property
    def drafted(self) -> int:
        """Positions at which the drafter drafted a token."""
        return sum(map(len, self.texts))

    @property
    def alpha(self) -> float:
        """Corollary 3.6 over the positions with a draft; NaN where nothing was drafted."""
        return self.estimates()[0][0]

    def estimates(self) -> list[Estimate]:
        """Alpha and its standard error, clustered by text, for each lenience."""
        return [_estimate(self.texts, column) for column in range(len(self.lenience))]

    def first_estimates(self) -> list[Estimate]:
        """The probability that one of the first k children is accepted, for each k."""
        return [_estimate(self.first, column) for column in range(FIRST)]

    @property
    def divergence(self) -> Estimate:
        """The mean of D_LK, which Corollary 3.6 subtracts from 1."""
        return _estimate(self.divergences)

    @property
    def rejection(self) -> Estimate:
        """The acceptance rate of rejection sampling with the same drafts."""
        return _estimate(self.rejections)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what cannot be estimated."""
        rows = [
            {"lenience": l, "alpha": _known(mean), "standard_error": _known(error)}
            for l, (mean, error) in zip(self.lenience, self.estimates(), strict=True)
        ]
        return {
            "alpha": rows[0]["alpha"],
            "standard_error": rows[0]["standard_error"],
            "divergence": _known(self.divergence[0]),
            "rejection_sampling": _known(self.rejection[0]),
            "positions": self.positions,
            "drafted": self.drafted,
            "texts": len(self.texts),
            "lenience": rows,
            "first_children": [_known(mean) for mean, _ in self.first_estimates()],
        }


def _estimate(texts: Sequence[Sequence[Tensor]], column: int | None = None) -> Estimate:
    values = [torch.stack(list(one)) for one in texts if one]
    mean, error = clustered_mean(values if column is None else [one[:, column] for one in values])
    return float(mean), float(error)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
