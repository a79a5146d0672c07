"""Rule k_seq (Sun et al. 2023): every child is tried against P and Q scaled by one factor rho.

See docs/rules.md#k_seq.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...arguments.status import Status
from ..row.distribution import TargetRow, prob_of
from .sequence import TreeSequence


def decide_k_seq(
    s: TreeSequence, depth: int, row: TargetRow, children: list[int]
) -> tuple[int | None, int]:
    """All children count as drawn from the row of the first."""
    if not children:
        return None, s.draw_at(depth, row.probs)
    drafts = [s.draft(children[0], s.tokens[n]) for n in children]
    first = drafts[0]
    if not first.valid or not all(d.valid_at_token for d in drafts):
        s.status |= Status.DRAFT_INVALID
        return None, s.draw_at(depth, row.probs)
    rho, beta = k_seq_factor(row.probs, first.probs, len(children))
    for trial, (n, draft) in enumerate(zip(children, drafts, strict=True)):
        p = prob_of(row.probs, s.tokens[n])
        if s.accept(n, p, rho * draft.token_prob, s.position + depth, trial):
            return n, -1
    any_accepted = 1 - (1 - beta) ** len(children)
    accepted = torch.minimum(first.probs, row.probs / rho)
    weights = (row.probs - accepted * (any_accepted / beta if beta > 0 else 0.0)).clamp(min=0)
    if not float(weights.sum()) > 0:
        s.status |= Status.EMPTY_RESIDUAL
        weights = row.probs
    return None, s.draw_at(depth, weights)


def k_seq_factor(p: Tensor, q: Tensor, k: int) -> tuple[float, float]:
    """The smallest rho in [1, K] with 1 - (1 - beta)^K <= rho * beta, beta = sum(min(Q, P / rho)).

    A larger rho is as lossless and accepts less. Returns (rho, beta).
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
