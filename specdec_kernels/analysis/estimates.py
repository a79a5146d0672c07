"""Running estimates of the acceptance rate while decoding goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def wilson_interval(rate: Tensor, visits: Tensor, z: float = 1.96) -> tuple[Tensor, Tensor]:
    """Confidence bounds of a probability whose estimate from `visits` trials is `rate`.

    Wilson 1927; tensors of any shape.

    z: normal quantile, 1.96 for 95 %.

    >>> wilson_interval(torch.tensor(0.5), torch.tensor(10.0))
    (tensor(0.2366), tensor(0.7634))
    """
    spread = z * z / visits
    middle = (rate + spread / 2) / (1 + spread)
    half = (rate * (1 - rate) * spread + spread * spread / 4).sqrt() / (1 + spread)
    return middle - half, middle + half


def clustered_mean(clusters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean of all values, and its standard error where values of one cluster depend on each other.

    Acceptance probabilities within one text do, those of different texts do not. The standard error
    is the cluster-robust one (Liang and Zeger 1986) with the factor G / (G - 1) for G clusters; of
    one cluster alone it takes the values for independent.

    Args:
        clusters: one tensor [n] of values each; an empty one counts for nothing.

    Returns:
        [] float64 each. They are NaN where there are no values, and the standard error also where
        there is one value only.

    >>> clustered_mean([torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])])
    (tensor(0.5000, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """
    filled = [values.double() for values in clusters if values.numel()]
    together = torch.cat(filled) if filled else torch.empty(0, dtype=torch.float64)
    mean = together.mean()
    sums = together - mean
    if len(filled) > 1:
        sums = torch.stack([(values - mean).sum() for values in filled])
    count = mean.new_tensor(len(sums))
    return mean, (count / (count - 1) * (sums * sums).sum()).sqrt() / together.numel()


class AcceptanceEstimate(NamedTuple):
    """Running estimate of the acceptance rate, for rules that stop at the first rejection.

    Drafts are *visited* up to and including the first rejection. Accepted over visited drafts is
    the maximum-likelihood estimate of a geometric distribution cut at gamma, because a round that
    accepts every draft has no rejection. If acceptance probabilities were recorded, their mean over
    visited drafts estimates the same rate without the noise of the acceptance uniforms. Counts fade
    by `decay` with every update. An estimate is an immutable value, and nothing in it waits for the
    device. Rates are NaN where nothing was visited.

    >>> seen = AcceptanceEstimate.empty(gamma=2).update(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]))
    >>> seen.alpha, seen.expected_tokens(2)
    (tensor(0.6667, dtype=torch.float64), tensor(2.1111, dtype=torch.float64))
    >>> seen.by_position
    tensor([0.6667, 0.6667], dtype=torch.float64)

    accepted: [gamma] float64, acceptances at each position of a draft, or their probabilities.
    squares: [gamma] float64, sums of the squared values that are summed in `accepted`.
    visits: [gamma] float64, sums of the weights of visited drafts.
    visits_squared: [gamma] float64, sums of their squared weights.
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
        """The estimate before the first round; drafts have at most gamma tokens.

        Raises:
            ValueError: decay is outside (0, 1].
        """
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay}")
        zeros = torch.zeros(gamma, dtype=torch.float64, device=device)
        return cls(zeros, zeros, zeros, zeros, decay)

    def update(
        self, num_accepted: Tensor, drafted: Tensor | int | None = None
    ) -> AcceptanceEstimate:
        """Adds the accepted counts of one round.

        Args:
            num_accepted: [B], accepted drafts of each sequence, at most `drafted`.
            drafted: [B] or a number: the drafts of each sequence that could be visited. None means
                gamma, 0 leaves the sequence out. Drafts from the first -1 on, after an
                end-of-sequence token or beyond `max_new_tokens` are never visited; without this
                argument the first of them counts as rejected. Pass the number of drafts before the
                first -1, and num_accepted for a sequence without recovered or bonus token, where
                `(tokens >= 0).sum(-1) == num_accepted`.
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
            probabilities: [B, gamma], `min(1, p/q)` of each visited draft, NaN for the others;
                what `verify_chain` returns as `accept_probs`.
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
        """[] float64: the acceptance rate over all positions."""
        return self.accepted.sum() / self.visits.sum()

    @property
    def by_position(self) -> Tensor:
        """[gamma] float64: the acceptance rate of the drafts visited at each position."""
        return self.accepted / self.visits

    @property
    def effective_visits(self) -> Tensor:
        """[] float64: the number of equally weighted visits that tell as much.

        It is `(sum w)^2 / sum w^2`.
        """
        return self.visits.sum() ** 2 / self.visits_squared.sum()

    @property
    def standard_error(self) -> Tensor:
        """[] float64: the standard error of `alpha` if visits are independent."""
        variance = self.squares.sum() / self.visits.sum() - self.alpha**2
        return (variance.clamp(min=0) / self.effective_visits).sqrt()

    def interval(self, z: float = 1.96) -> tuple[Tensor, Tensor]:
        """Wilson bounds of `alpha`; wider than necessary for recorded probabilities."""
        return wilson_interval(self.alpha, self.effective_visits, z)

    def expected_tokens(self, gamma: int) -> Tensor:
        """[] float64: mean acceptance length, the bonus token included (Equation 1)."""
        return (self.alpha ** torch.arange(gamma + 1, device=self.alpha.device)).sum()
