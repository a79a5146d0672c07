"""Top-k, top-p and min-p of one row, as one threshold on its logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def threshold(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest logit that survives, of a float64 row [V]; equal logits survive together.

    Top-p applies to what top-k kept. See docs/rules.md#sampling.
    """
    v = logits.numel()
    keep = -math.inf
    ordered = logits.sort(descending=True).values
    if 0 < top_k < v:
        keep = float(ordered[top_k - 1])
    if top_p < 1:
        ordered = ordered[ordered >= keep]
        mass = torch.exp((ordered - ordered[0]) / temperature).cumsum(0)
        first = int((mass >= top_p * mass[-1]).nonzero()[0])
        keep = float(ordered[first])
    if min_p > 0:
        keep = max(keep, float(logits.max()) + temperature * math.log(min_p))
    return keep
