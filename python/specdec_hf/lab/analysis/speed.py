"""Expected against measured walltime (Leviathan et al. 2023, Table 4), from recorded rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec_hf.decode.round_record import RoundRecord
from specdec_hf.decode.statistics import SpecStats
from specdec_kernels.analysis import expected_tokens, walltime_factor


@dataclass(frozen=True)
class Speed:
    """One row of Table 4, measured here at batch size 1.

    The first round of each text, which reads the prompt, is left out of all figures.

    Attributes:
        temperature, gamma, alpha: as in the table.
        cost: c, time of one draft step in units of one plain step.
        verification: v, time to verify the drafts of a round, with what a round does beside it, in
            the same units; the paper assumes 1.
        drafting: share of the rounds that drafted. A drafter that copies cannot always.
        expected_paper: Theorem 3.8, for rounds that all draft gamma tokens and v = 1.
        expected: the same with measured v and share of rounds that drafted.
        measured: tokens per second over those of plain decoding.
        expected_tokens, measured_tokens: tokens per round.
    """

    temperature: float
    gamma: int
    alpha: float
    cost: float
    verification: float
    drafting: float
    expected_paper: float
    expected: float
    measured: float
    expected_tokens: float
    measured_tokens: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def compare_speed(
    plain: Sequence[SpecStats],
    speculative: Sequence[SpecStats],
    *,
    alpha: float,
    gamma: int,
    temperature: float,
) -> Speed | None:
    """A row of Table 4; None where no round after the first drafted anything.

    Args:
        plain, speculative: statistics of the same prompts without and with drafts, one sequence
            each.
        alpha: measured acceptance rate.
        gamma: drafts per round.
        temperature: of both.
    """
    steps, rounds = later_rounds(plain), later_rounds(speculative)
    with_drafts = [r for r in rounds if r.drafted[0]]
    if not steps or not with_drafts:
        return None
    step = sum(r.seconds for r in steps) / _emitted(steps)
    drafted = sum(r.drafted[0] for r in with_drafts)
    cost = sum(r.draft for r in with_drafts) / drafted / step
    verification = sum(r.target + r.after_target for r in with_drafts) / len(with_drafts) / step
    share = len(with_drafts) / len(rounds)
    tokens = share * expected_tokens(alpha, gamma) + 1 - share
    seconds = share * (gamma * cost + verification) + 1 - share
    return Speed(
        temperature=temperature,
        gamma=gamma,
        alpha=alpha,
        cost=cost,
        verification=verification,
        drafting=share,
        expected_paper=walltime_factor(alpha, gamma, cost),
        expected=tokens / seconds,
        measured=step / (sum(r.seconds for r in rounds) / _emitted(rounds)),
        expected_tokens=tokens,
        measured_tokens=_emitted(rounds) / len(rounds),
    )


def later_rounds(calls: Sequence[SpecStats]) -> list[RoundRecord]:
    """The rounds of calls of one sequence, without the first of each, which reads the prompt."""
    return [record for stats in calls for record in stats.round_log[1:]]


def _emitted(rounds: Sequence[RoundRecord]) -> int:
    return sum(record.emitted[0] for record in rounds)
