"""What speculative decoding is worth: how often drafts stand, and what that saves.

Formulas of Leviathan et al. 2023 (arXiv 2211.17192), section 3, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_kernels.enumeration import RealizedLaw, Verify, enumerate_law, joint_law

__all__ = [
    "RealizedLaw",
    "Verify",
    "acceptance_rate",
    "enumerate_law",
    "expected_tokens",
    "filtered_law",
    "joint_law",
    "match_acceptance",
    "mean_accepted",
    "operations_factor",
    "optimal_gamma",
    "walltime_factor",
]


def acceptance_rate(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rule `token` accepts a draft from q: `sum(min(p, q))`, [..., V] -> [...].

    Theorem 3.5.

    >>> acceptance_rate(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]))
    tensor(0.7500)
    """
    return torch.minimum(p, q).sum(-1)


def match_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rule `match` accepts: both draw [V] with the same noise.

    `sum_x 1 / sum_y max(p_y/p_x, q_y/q_x)`, Daliri et al. 2024 (arXiv 2408.07978).

    >>> match_acceptance(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]))
    tensor(1.)
    """
    both = (p > 0) & (q > 0)
    ratios = torch.maximum(p / p[both, None], q / q[both, None])
    return (1 / ratios.sum(-1)).sum()


def expected_tokens(alpha: float, gamma: int) -> float:
    """Mean tokens of one verification, bonus included: (1 - alpha^(gamma+1)) / (1 - alpha).

    Equation 1.

    >>> expected_tokens(0.5, 1), expected_tokens(1.0, 4)
    (1.5, 5.0)
    """
    return sum(alpha**i for i in range(gamma + 1))


def walltime_factor(alpha: float, gamma: int, cost: float, verification: float = 1.0) -> float:
    """Speed-up over plain decoding, Theorem 3.8.

    cost: time of one draft step, and verification: time of one verification of gamma drafts, both
    in units of one plain target step.

    >>> round(walltime_factor(0.8, 5, 0.02), 3)
    3.354
    """
    return expected_tokens(alpha, gamma) / (gamma * cost + verification)


def operations_factor(alpha: float, gamma: int, cost: float) -> float:
    """Arithmetic per token against plain decoding, Theorem 3.11.

    cost: operations of the draft model for one token, those of the target model being 1.

    >>> operations_factor(0.5, 1, 0.0)
    1.3333333333333333
    """
    return (gamma * cost + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(
    alpha: float,
    cost: float,
    limit: int = 64,
    verification: Callable[[int], float] | None = None,
) -> int:
    """The gamma in [0, limit] of largest walltime factor; the smallest of equals.

    verification: time of a verification of gamma drafts; None takes 1 for all.

    >>> optimal_gamma(0.8, 0.02), optimal_gamma(0.1, 0.5)
    (11, 0)
    """

    def factor(gamma: int) -> float:
        return walltime_factor(alpha, gamma, cost, verification(gamma) if verification else 1.0)

    return max(range(limit + 1), key=factor)


def filtered_law(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """[V] float64 probabilities by the definition of each filter, from pairwise comparisons.

    A token stands if fewer than top_k tokens are larger, if the larger survivors hold less than
    top_p of the survivors' mass, and if it has at least min_p of the largest probability.

    >>> filtered_law(torch.tensor([0.0, 0.0, -1.0]), top_k=1)
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


def mean_accepted(draft: Sequence[Tensor], target: Sequence[Tensor]) -> float:
    """Expected accepted drafts of rule `token` for conditionals that depend on the prefix."""
    overlaps = [torch.minimum(p, q) for p, q in zip(target, draft, strict=False)]
    return sum(float(joint_law(overlaps[:i]).sum()) for i in range(1, len(draft) + 1))
