"""What the positions of texts say together: acceptance rates, also under lenience."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_hf.lab.analysis.replay import Position
from specdec_kernels.analysis import LENIENCES, acceptance_rate, clustered_mean


@dataclass
class MeasuredAcceptance:
    """The acceptance probabilities of one drafter, gathered position by position.

    Attributes:
        lenience: the values l whose acceptance `sum(min(P / l, Q))` is gathered; the first is 1,
            the lossless rule.
        texts: one list for each text, of [len(lenience)] float64 for each position with a draft.
        positions: all positions, those without a draft included.
    """

    lenience: Sequence[float] = LENIENCES
    texts: list[list[Tensor]] = field(default_factory=list)
    positions: int = 0

    def begin_text(self) -> None:
        """The positions that follow belong to a new text."""
        self.texts.append([])

    def add(self, position: Position) -> None:
        """Gather one position of the current text."""
        self.positions += 1
        if position.q is not None:
            p, q = position.p, position.q
            rates = [acceptance_rate(p, q, "lenient", lenience=l) for l in self.lenience]
            self.texts[-1].append(torch.stack(rates))

    @property
    def drafted(self) -> int:
        """Positions at which the drafter drafted a token."""
        return sum(map(len, self.texts))

    @property
    def alpha(self) -> float:
        """Corollary 3.6 over the positions with a draft; NaN where nothing was drafted."""
        return self.estimates()[0][0]

    def estimates(self) -> list[tuple[float, float]]:
        """Alpha and its standard error, clustered by text, for each lenience."""
        means = []
        for column in range(len(self.lenience)):
            texts = [torch.stack(rates)[:, column] for rates in self.texts if rates]
            mean, error = clustered_mean(texts)
            means.append((float(mean), float(error)))
        return means

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for what cannot be estimated."""
        rows = [
            {"lenience": l, "alpha": _known(mean), "standard_error": _known(error)}
            for l, (mean, error) in zip(self.lenience, self.estimates(), strict=True)
        ]
        return {
            "alpha": rows[0]["alpha"],
            "standard_error": rows[0]["standard_error"],
            "positions": self.positions,
            "drafted": self.drafted,
            "texts": len(self.texts),
            "lenience": rows,
        }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
