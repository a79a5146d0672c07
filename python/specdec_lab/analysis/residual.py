"""What goes wrong without the residual: Leviathan et al. 2023, sections 2.3 and A.1.

After a rejection the recovered token comes from norm(max(P - Q, 0)). The ablation draws it from P
instead, so that a token x is emitted with probability min(P(x), Q(x)) + (1 - beta) P(x), where beta
is the acceptance probability. That favours what the drafter already proposes too often.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import SampledDraft, sample, verify_chain
from specdec_kernels.analysis import accepted_mass
from specdec_lab.analysis.replay import Position

MIN_EXPECTED = 5.0  # draws in each cell of a chi-square test
ACCEPT_ALL = 1e-9  # below it a rejection is a matter of rounding


@dataclass(frozen=True)
class Ablated:
    """The distributions after one position, with and without the residual.

    Attributes:
        rejection: probability that the draft is rejected.
        recovered: total variation between P, which the ablation draws the recovered token from,
            and the residual.
        correct, ablated: total variation between P and the emitted token's distribution.
    """

    rejection: float
    recovered: float
    correct: float
    ablated: float


def total_variation(p: Tensor, q: Tensor) -> float:
    """Half the sum of the absolute differences of two distributions [V]."""
    return float((p - q).abs().sum() / 2)


def ablate_residual(p: Tensor, q: Tensor) -> Ablated:
    """The exact effect of the ablation on the token that follows, for distributions [V]."""
    accepted = accepted_mass(p, q)
    rejection = float(1 - accepted.sum())
    if rejection < ACCEPT_ALL:
        return Ablated(0.0, 0.0, total_variation(accepted, p), total_variation(accepted, p))
    residual = (p - q).clamp(min=0)
    residual = residual / residual.sum()
    return Ablated(
        rejection,
        total_variation(p, residual),
        total_variation(accepted + rejection * residual, p),
        total_variation(accepted + rejection * p, p),
    )


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test that counts follow a distribution: statistic, degrees of freedom, p-value."""

    statistic: float
    degrees: int
    p_value: float


def chi_square(counts: Tensor, probs: Tensor) -> ChiSquare:
    """Pearson's test of counts [V] against probabilities [V].

    Tokens that are expected fewer than 5 times share one cell, unless that would still be fewer.
    """
    expected = probs.double() * counts.sum()
    large = expected >= MIN_EXPECTED
    observed = torch.cat([counts[large].double(), counts[~large].sum()[None].double()])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    if expected[-1] < MIN_EXPECTED and len(expected) > 1:  # too few for a cell of their own
        observed[0], expected[0] = observed[0] + observed[-1], expected[0] + expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    if degrees == 0:
        return ChiSquare(0.0, 0, 1.0)
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    return ChiSquare(
        float(statistic), degrees, float(torch.special.gammaincc(half, statistic.cpu() / 2))
    )


@dataclass(frozen=True)
class Experiment:
    """Tokens drawn at one position, through the op and with the ablation.

    Attributes:
        index: of the position in its text.
        draws: how many tokens were drawn each way.
        correct, ablated: tests of their counts against P.
        exact: what is exact about that position.
    """

    index: int
    draws: int
    correct: ChiSquare
    ablated: ChiSquare
    exact: Ablated


@torch.inference_mode()
def draw_experiment(
    position: Position, sampling: dict[str, Any], draws: int, seed: int = 0
) -> Experiment:
    """Draw tokens after one position: verified by the op, and with the ablation in its place.

    Args:
        position: of `replay`, with a draft.
        sampling: the parameters of target and drafter; the temperature is above 0.
        draws: how many tokens of each kind.
        seed: of the first draw; the others count up from it.
    """
    assert position.draft is not None
    assert position.q is not None
    row, held = position.logits, position.draft.drawn
    rows = row.expand(draws, 2, -1)
    seeds, zeros = torch.arange(seed, seed + draws), torch.zeros(draws, dtype=torch.int64)
    draft: SampledDraft | None = None
    if held is None:
        drafted = position.draft.tokens[:1, :1].cpu().expand(draws, 1)
    else:
        draft = _repeated(held.at(sampling["temperature"]), draws)
        drawn = sample(draft.logits[:, 0], **sampling, seeds=seeds, positions=zeros)
        drafted = drawn.tokens[:, None]
    verdict = verify_chain(
        rows, drafted, draft, rule="token", **sampling, seeds=seeds, positions=zeros
    )
    from_target = sample(row.expand(draws, -1), **sampling, seeds=seeds, positions=zeros + 1)
    kept = verdict.num_accepted > 0
    ablated = torch.where(kept, drafted[:, 0], from_target.tokens)
    return Experiment(
        position.index,
        draws,
        chi_square(_counts(verdict.tokens[:, 0], len(row)), position.p),
        chi_square(_counts(ablated, len(row)), position.p),
        ablate_residual(position.p, position.q),
    )


@dataclass
class Ablation:
    """The effect of leaving out the residual, at every position with a draft.

    Attributes:
        positions: exact effect at each.
        worst: the position where the emitted token's distribution is most wrong.
        experiment: tokens drawn there, once they are.
    """

    positions: list[Ablated] = field(default_factory=list)
    worst: Position | None = None
    experiment: Experiment | None = None
    _largest: float = -1.0

    def add(self, position: Position) -> None:
        """Gather one position of `replay`."""
        if position.q is None:
            return
        effect = ablate_residual(position.p, position.q)
        self.positions.append(effect)
        if effect.ablated > self._largest:
            self._largest, self.worst = effect.ablated, position

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: means over the positions, and the experiment."""
        count = len(self.positions)
        means = {
            name: sum(getattr(one, name) for one in self.positions) / count if count else None
            for name in ("rejection", "recovered", "correct", "ablated")
        }
        largest = max((one.ablated for one in self.positions), default=None)
        return {
            "positions": count,
            "mean": means,
            "largest": largest,
            "experiment": None if self.experiment is None else asdict(self.experiment),
        }


def _repeated(distribution: SampledDraft, draws: int) -> SampledDraft:
    """The first row of a distribution, seen as the row of many sequences."""
    logits, logsumexp, threshold = (x[:1, :1].cpu() for x in distribution[:3])
    return SampledDraft(
        logits.expand(draws, 1, -1),
        logsumexp.expand(draws, 1),
        threshold.expand(draws, 1),
        distribution.temperature,
    )


def _counts(tokens: Tensor, vocab_size: int) -> Tensor:
    return torch.bincount(tokens, minlength=vocab_size)
