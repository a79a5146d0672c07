"""The savings of speculative decoding; Leviathan et al. 2023 (arXiv 2211.17192), section 3."""

from __future__ import annotations

import math
from collections.abc import Callable


def expected_tokens(alpha: float, gamma: int) -> float:
    """Mean acceptance length, the bonus token included: (1 - alpha^(gamma+1)) / (1 - alpha).

    Equation 1. Tokens per target forward if every draft is accepted with probability alpha.

    >>> expected_tokens(0.5, 1), expected_tokens(1.0, 4)
    (1.5, 5.0)
    """
    return sum(alpha**i for i in range(gamma + 1))


def walltime_factor(alpha: float, gamma: int, cost: float, verification: float = 1.0) -> float:
    """Speed-up over plain decoding, Theorem 3.8.

    cost: time of one draft step. verification: time to verify gamma drafts. Both in units of one
        plain target step.

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


def improvement_bound(alpha: float, cost: float) -> float:
    """The speed-up that the best gamma reaches at least, Corollary 3.9: (1 + alpha) / (1 + cost).

    It is that of one draft a round, and 1, which plain decoding has, where alpha does not exceed
    the cost: then no gamma is faster.

    >>> improvement_bound(0.75, 0.25), improvement_bound(0.25, 0.5)
    (1.4, 1.0)
    """
    return max(walltime_factor(alpha, 1, cost), 1.0)


def memory_accesses_factor(alpha: float, gamma: int) -> float:
    """Reads of the target's weights and KV cache per token against plain decoding, section 3.4.

    They are read once a round, so it is the inverse of Equation 1. Reads of the drafter are left
    out, as in the paper.

    >>> memory_accesses_factor(0.5, 2)
    0.5714285714285714
    """
    return 1 / expected_tokens(alpha, gamma)


def oracle_factor(alpha: float, cost: float) -> float:
    """Speed-up with an oracle that drafts just the tokens that will be accepted, section 3.5.

    A round then has 1 / (1 - alpha) tokens, of which one is not drafted, and takes
    1 + cost * alpha / (1 - alpha) plain steps. It is infinite where drafts cost nothing and are all
    accepted, and 1 where a draft costs more than a plain step, so that none is made.

    >>> round(oracle_factor(0.75, 0.25), 3)
    2.286
    """
    seconds = 1 - alpha + min(cost, 1) * alpha
    return 1 / seconds if seconds > 0 else math.inf


def optimal_gamma(
    alpha: float,
    cost: float,
    limit: int = 64,
    verification: Callable[[int], float] | None = None,
) -> int:
    """The gamma in [0, limit] with the largest walltime factor; the smallest one of equals.

    verification: gamma -> time to verify so many drafts; None means 1 for every gamma.

    Raises:
        ValueError: limit is negative.

    >>> optimal_gamma(0.8, 0.02), optimal_gamma(0.1, 0.5)
    (11, 0)
    """

    if limit < 0:
        raise ValueError(f"limit must be at least 0, got {limit}")

    def factor(gamma: int) -> float:
        return walltime_factor(alpha, gamma, cost, verification(gamma) if verification else 1.0)

    return max(range(limit + 1), key=factor)
