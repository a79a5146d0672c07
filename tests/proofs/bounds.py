"""Bounds on the acceptance of any lossless rule, which the rules are measured against."""

from __future__ import annotations

import torch
from torch import Tensor


def acceptance_bound(p: Tensor, q: Tensor, drafts: int = 1) -> Tensor:
    """The most that a lossless rule can accept of independent drafts from Q, [..., V] -> [...].

    It is `1 + min_S [p(S) - q(S)^drafts]`, the probability that one of the drafts is emitted. The
    minimum is at a set of largest q/p, so one sort finds it. For one draft it is the
    acceptance rate of rule token.

    >>> acceptance_bound(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]), drafts=2)
    tensor(0.9375, dtype=torch.float64)
    """
    p, q = torch.broadcast_tensors(p.double(), q.double())
    order = (p / q).argsort(-1)
    within = q.gather(-1, order).cumsum(-1)
    # Float32 rows sum to 1 only nearly; unnormalised, what Q lacks would count as rejected.
    outside = (within / within[..., -1:]) ** drafts
    return 1 + (p.gather(-1, order).cumsum(-1) - outside).amin(-1).clamp(max=0)
