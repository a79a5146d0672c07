"""Ways to use drafts that speculative sampling is compared with; see `specdec_kernels.analysis`."""

from __future__ import annotations

import torch
from torch import Tensor


def rejection_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rejection sampling accepts a draft, [..., V] -> [...].

    A draft x is accepted with probability `p(x) / (M q(x))`, where M is the largest p / q, and
    otherwise a token is drawn from P itself. That keeps the distribution P, and accepts in 1 / M of
    the cases: never more than rule token does, and never where P holds a token that Q lacks.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Appendix A.2.

    >>> rejection_acceptance(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]))
    tensor(0.5000, dtype=torch.float64)
    """
    p, q = p.double(), q.double()
    # Tokens that P excludes are never accepted, and do not bound M.
    return torch.where(p > 0, q / p, torch.inf).amin(-1).clamp(max=1)


def rejection_mass(p: Tensor, q: Tensor) -> Tensor:
    """[..., V] float64: probability that each token is drafted and accepted by rejection sampling.

    It is p / M: the shape of P itself, so that the tokens drawn after a rejection need no residual.

    >>> rejection_mass(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]))
    tensor([0.2500, 0.2500], dtype=torch.float64)
    """
    return p.double() * rejection_acceptance(p, q)[..., None]


def best_of_tokens(alpha: float, gamma: int, sequences: int) -> float:
    """Mean tokens of a round that verifies several chains side by side and keeps the longest.

    Each chain of gamma drafts is accepted token by token with probability alpha, independently of
    the others, and the recovered or bonus token is included. Greedy decoding alone is lossless with
    it: the longest of several sampled chains is not distributed as P, because a chain that holds
    likelier tokens gets longer.

    Source: the batched extension in appendix A of Stratos's notes on speculative decoding.

    Raises:
        ValueError: gamma below 0, or sequences below 1.

    >>> best_of_tokens(0.5, 2, 1), best_of_tokens(0.5, 2, 2)
    (1.75, 2.1875)
    """
    _check_gamma(gamma)
    if sequences < 1:
        raise ValueError(f"sequences must be at least 1, got {sequences}")
    return 1 + sum(1 - (1 - alpha**i) ** sequences for i in range(1, gamma + 1))


def best_of_likeliest_tokens(first: float, alpha: float, gamma: int) -> float:
    """The same for the chains of one greedy drafter that begin with its K likeliest tokens.

    At most one of them begins with the target's token, and goes on as a single chain does.

    Args:
        first: probability that the target's token is among the K likeliest.
        alpha: probability that each later draft of that chain is accepted.
        gamma: drafts of each chain.

    Raises:
        ValueError: gamma below 0.

    >>> best_of_likeliest_tokens(0.75, 0.5, 2)
    2.125
    """
    _check_gamma(gamma)
    return 1 + first * sum(alpha**i for i in range(gamma))


def _check_gamma(gamma: int) -> None:
    if gamma < 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")
