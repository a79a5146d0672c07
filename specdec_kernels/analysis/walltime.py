"""The savings of speculative decoding; Leviathan et al. 2023 (arXiv 2211.17192), section 3."""

from __future__ import annotations

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
