"""The residual of a chain: what the recovered token is drawn from after a rejection.

After the accepted drafts the tokens that Q proposes too rarely must be made up for: the recovered
token is drawn from norm(max(scale * P - lenience * Q, 0)). Rule token has scale = lenience = 1
(docs/rules.md#token), rule block scales P and rule lenient scales Q.
"""

from __future__ import annotations

import math

from torch import Tensor

from specdec_kernels.arguments.status import Status
from specdec_kernels.reference.chain.sequence import ChainSequence
from specdec_kernels.reference.row.draft import DraftDistribution


def ratio(p: float, q: float) -> float:
    """P(x) / Q(x). A token of Q = 0 is accepted whenever P > 0."""
    return 0.0 if p == 0 else p / q if q else math.inf


def recovered_token(
    s: ChainSequence,
    i: int,
    p: Tensor,
    draft: DraftDistribution,
    scale: float = 1.0,
    lenience: float = 1.0,
) -> int:
    """Draws the token after i accepted drafts; from P itself where there is no residual."""
    if not draft.valid:
        s.status |= Status.DRAFT_INVALID
        return s.draw_after(i, p)
    residual = (scale * p - lenience * draft.probs).clamp(min=0)
    if not float(residual.sum()) > 0:
        s.status |= Status.EMPTY_RESIDUAL
        residual = p
    return s.draw_after(i, residual)


def block_accept_prob(c: float, p: Tensor, draft: DraftDistribution) -> float:
    """h_i of rule block as the ratio of two one-sided differences, c * P - Q and Q - c * P.

    Unlike the textbook form it needs no rows that sum to 1 exactly. Where nothing of Q lies above
    c * P, the two are equal and h = c = 1, or the row does not hold a distribution.
    """
    above = float((c * p - draft.probs).clamp(min=0).sum())
    below = float((draft.probs - c * p).clamp(min=0).sum()) + draft.mass_beyond
    return min(1.0, above / below) if below > 0 else c
