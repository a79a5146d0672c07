"""The acceptance rate as it shows while decoding goes on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def wilson_interval(rate: Tensor, visits: Tensor, z: float = 1.96) -> tuple[Tensor, Tensor]:
    """Bounds of a probability seen as `rate` in this many visits, Wilson 1927; any shape.

    z: normal quantile, 1.96 for 95 %.

    >>> wilson_interval(torch.tensor(0.5), torch.tensor(10.0))
    (tensor(0.2366), tensor(0.7634))
    """
    spread = z * z / visits
    middle = (rate + spread / 2) / (1 + spread)
    half = (rate * (1 - rate) * spread + spread * spread / 4).sqrt() / (1 + spread)
    return middle - half, middle + half


class AcceptanceEstimate(NamedTuple):
    """Running estimate of the acceptance rate, for rules that stop at the first rejection.

    A position of a draft is visited until the first rejection, so acceptances over visits is the
    maximum-likelihood estimate of a geometric law cut at gamma: a round that accepted everything
    has no rejection. Where the probability of acceptance was recorded, its mean over the visits
    estimates the same without the noise of the coins. Counts fade by `decay` with every update. An
    estimate is a value, and nothing in it waits for the device. NaN where nothing was visited.

    >>> seen = AcceptanceEstimate.empty(gamma=2).update(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]))
    >>> seen.alpha, seen.expected_tokens(2)
    (tensor(0.6667, dtype=torch.float64), tensor(2.1111, dtype=torch.float64))
    >>> seen.by_position
    tensor([0.6667, 0.6667], dtype=torch.float64)

    accepted: [gamma] float64, acceptances at each position of a draft, or their probabilities.
    squares: [gamma] float64, the same of their squares.
    visits: [gamma] float64, faded visits.
    visits_squared: [gamma] float64, visits faded by the squared weights.
    decay: weight of the past at an update, in (0, 1]; 1 keeps all.
    """

    accepted: Tensor
    squares: Tensor
    visits: Tensor
    visits_squared: Tensor
    decay: float

    @classmethod
    def empty(
        cls, gamma: int, decay: float = 1.0, device: torch.device | str | None = None
    ) -> AcceptanceEstimate:
        """Nothing seen yet of drafts of at most gamma tokens.

        Raises:
            ValueError: decay is outside (0, 1].
        """
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        nothing = torch.zeros(gamma, dtype=torch.float64, device=device)
        return cls(nothing, nothing, nothing, nothing, decay)

    def update(
        self, num_accepted: Tensor, drafted: Tensor | int | None = None
    ) -> AcceptanceEstimate:
        """Adds one round of verdicts.

        Args:
            num_accepted: [B], accepted drafts of each sequence, at most `drafted`.
            drafted: [B] or a number, drafts of each sequence that could be judged; None means
                gamma, 0 leaves the sequence out. None is judged from the first -1 on, after an
                end-of-sequence token or from `max_new_tokens` on, and without this argument the first of
                them counts as rejected. Give the drafts before the first -1, and num_accepted where
                nothing followed the accepted drafts: `(tokens >= 0).sum(-1) == num_accepted`.
        """
        position = torch.arange(len(self.visits), device=self.visits.device)
        count = num_accepted[:, None]
        visited = position <= count
        if drafted is not None:
            visited &= position < (drafted[:, None] if isinstance(drafted, Tensor) else drafted)
        return self._add((position < count).double(), visited)

    def observe(self, probabilities: Tensor) -> AcceptanceEstimate:
        """Adds one round of acceptance probabilities.

        Args:
            probabilities: [B, gamma], `min(1, p/q)` of the draft at each visited position, NaN
                where none was visited.
        """
        return self._add(probabilities.double(), ~probabilities.isnan())

    def _add(self, value: Tensor, visited: Tensor) -> AcceptanceEstimate:
        value, fade = torch.where(visited, value, 0.0), self.decay
        visits = visited.double().sum(0)
        return AcceptanceEstimate(
            fade * self.accepted + value.sum(0),
            fade * self.squares + (value * value).sum(0),
            fade * self.visits + visits,
            fade * fade * self.visits_squared + visits,
            fade,
        )

    @property
    def alpha(self) -> Tensor:
        """[] float64, all positions together."""
        return self.accepted.sum() / self.visits.sum()

    @property
    def by_position(self) -> Tensor:
        """[gamma] float64, of the drafts visited at each position."""
        return self.accepted / self.visits

    @property
    def effective_visits(self) -> Tensor:
        """[] float64: visits of equal weight that would tell as much, `(sum w)^2 / sum w^2`."""
        return self.visits.sum() ** 2 / self.visits_squared.sum()

    @property
    def standard_error(self) -> Tensor:
        """[] float64: of `alpha`, visits taken as independent."""
        variance = self.squares.sum() / self.visits.sum() - self.alpha**2
        return (variance.clamp(min=0) / self.effective_visits).sqrt()

    def interval(self, z: float = 1.96) -> tuple[Tensor, Tensor]:
        """Wilson bounds of `alpha`; for recorded probabilities they are wider than need be."""
        return wilson_interval(self.alpha, self.effective_visits, z)

    def expected_tokens(self, gamma: int) -> Tensor:
        """[] float64: mean tokens of one verification, bonus included (Equation 1)."""
        return (self.alpha ** torch.arange(gamma + 1, device=self.alpha.device)).sum()
