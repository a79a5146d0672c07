"""The residual of P after siblings were rejected, in float64.

After one rejection it is max(P - Q, 0), after the next max(P' - Q', 0) of the normalised residual
P', and so on. It is kept unnormalised: see docs/rules.md#multi_draft.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ..row.draft import DraftDistribution

# Where the tokens not yet tried have less mass than this in Q, they count as none: entries of Q
# that the kernels round to 0 would weigh too much there. Only Q is asked, so rules stay lossless.
LEAST_MASS = 1e-26


@dataclass
class TargetResidual:
    """P' = weights / mass after some rejections; at first P itself.

    Whoever subtracts a Q sets `mass` to the sum of the new weights.
    """

    weights: Tensor
    mass: float = 1.0

    def minus(
        self, draft: DraftDistribution, scale: float, excluded: Iterable[int]
    ) -> TargetResidual:
        """max(weights - scale * Q, 0), with Q taken as 0 at the excluded ids."""
        q = draft.probs.clone()
        q[[x for x in excluded if x < len(q)]] = 0.0
        return TargetResidual((self.weights - scale * q).clamp(min=0))


def mass_without(draft: DraftDistribution, excluded: dict[int, float]) -> float:
    """Mass of Q outside some ids, which are given with their probabilities; 1 without any."""
    if not excluded:
        return 1.0
    v = len(draft.probs)
    inside = draft.probs.clone()
    inside[[x for x in excluded if x < v]] = 0.0
    excluded_beyond = sum(q for x, q in excluded.items() if x >= v)
    return float(inside.sum()) + draft.mass_beyond - excluded_beyond
