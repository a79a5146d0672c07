"""Exact distributions, written from their definitions, that tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def filtered_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Tensor:
    """[V] float64 probabilities of one row [V], by pairwise comparisons instead of a threshold.

    A token survives if fewer than top_k tokens are larger, if the larger survivors hold less than
    top_p of the survivors' mass, and if it has at least min_p of the largest probability.

    >>> filtered_distribution(torch.tensor([0.0, 0.0, -1.0]), top_k=1)
    tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """
    x = logits.double()
    if temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
    larger = x[None, :] > x[:, None]  # [V, V]
    keep = torch.ones_like(x, dtype=torch.bool)
    if top_k > 0:
        keep &= larger.sum(-1) < top_k
    p = torch.where(keep, ((x - x.max()) / temperature).exp(), 0.0)
    if top_p < 1:
        keep &= (larger * p).sum(-1) < top_p * p.sum()
    keep &= p >= min_p * p.max()
    p = torch.where(keep, p, 0.0)
    return p / p.sum()


def joint_distribution(conditionals: Sequence[Tensor]) -> Tensor:
    """[V] * n float64: joint distribution of n tokens.

    conditionals: `conditionals[i]` [V] * (i + 1) is the distribution of token i after each prefix
        of i tokens, which index its first dimensions.

    >>> joint_distribution([torch.tensor([0.5, 0.5]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])])
    tensor([[0.5000, 0.0000],
            [0.2500, 0.2500]], dtype=torch.float64)
    """
    joint = torch.ones((), dtype=torch.float64)
    for table in conditionals:
        joint = joint.unsqueeze(-1) * table
    return joint
