"""The residual of a chain, from which the recovered token is drawn after a rejection.

It is norm(max(p_scale * P - lenience * Q, 0)). Rule token has p_scale = lenience = 1
(docs/rules.md#token), rule block scales P and rule lenient scales Q.
"""

from __future__ import annotations

import math

from torch import Tensor

from ...arguments.status import Status
from ..row.draft import DraftDistribution
from .sequence import ChainSequence


def ratio(p: float, q: float) -> float:
    """P(x) / Q(x), where 0 / 0 counts as 0 and any other division by 0 as infinite."""
    return 0.0 if p == 0 else p / q if q else math.inf


def recovered_token(
    s: ChainSequence,
    i: int,
    p: Tensor,
    draft: DraftDistribution,
    p_scale: float = 1.0,
    lenience: float = 1.0,
) -> int:
    """Draws the token after i accepted drafts; from P itself where there is no residual."""
    if not draft.valid:
        s.status |= Status.DRAFT_INVALID
        return s.draw_after(i, p)
    residual = (p_scale * p - lenience * draft.probs).clamp(min=0)
    if not float(residual.sum()) > 0:
        s.status |= Status.EMPTY_RESIDUAL
        residual = p
    return s.draw_after(i, residual)


def block_accept_prob(p_scale: float, p: Tensor, draft: DraftDistribution) -> float:
    """h_i of docs/rules.md#block, the acceptance probability of the drafts before a row.

    It is the sum of max(p_scale * P - Q, 0) divided by that of max(Q - p_scale * P, 0). Unlike the
    formula of the paper, this one does not need rows that sum to 1 exactly. If p_scale * P is
    nowhere below Q, then p_scale is 1 and P equals Q, and h_i is p_scale.
    """
    positive = float((p_scale * p - draft.probs).clamp(min=0).sum())
    negative = float((draft.probs - p_scale * p).clamp(min=0).sum()) + draft.mass_beyond
    return min(1.0, positive / negative) if negative > 0 else p_scale
