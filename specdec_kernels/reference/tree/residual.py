"""What a target row has left after siblings of a tree were rejected, in float64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_kernels.reference.row.draft import Draft

LEAST_REST = 1e-26  # csrc/include/specdec/tree.h says why


@dataclass
class Left:
    """What the target has left after siblings were rejected: (c P - sum of scales * Q)+ / mass.

    So far the scale of the next sibling's Q is `mass`. Nothing is left of a rejected token.
    """

    weights: Tensor
    mass: float = 1.0

    def subtract(self, draft: Draft, scale: float, excluded: Iterable[int]) -> Left:
        q = draft.q.clone()
        q[[x for x in excluded if x < len(q)]] = 0.0
        return Left((self.weights - scale * q).clamp(min=0))


def without(draft: Draft, taken: dict[int, float]) -> float:
    """Mass of Q off some ids with these probabilities; 1 where there are none."""
    if not taken:
        return 1.0
    v = len(draft.q)
    inside = draft.q.clone()
    inside[[x for x in taken if x < v]] = 0.0
    return float(inside.sum()) + draft.beyond - sum(q for x, q in taken.items() if x >= v)


def k_seq_factor(p: Tensor, q: Tensor, k: int) -> tuple[float, float]:
    """The smallest rho in [1, K] with 1 - (1 - beta)^K <= rho * beta, beta = sum(min(Q, P / rho)).

    At any larger rho the rule is as lossless, and accepts less.
    """

    def beta_of(rho: float) -> float:
        return min(1.0, float(torch.minimum(q, p / rho).sum()))

    low, high = 1.0, float(k)
    if not beta_of(high) > 0:
        return high, 0.0
    for _ in range(100):
        rho = (low + high) / 2
        beta = beta_of(rho)
        if 1 - (1 - beta) ** k <= rho * beta:
            high = rho
        else:
            low = rho
    return high, beta_of(high)
