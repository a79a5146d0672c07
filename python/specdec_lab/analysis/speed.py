"""Speed and what the theorems expect of it: Table 4 and section 3.5 of Leviathan et al. 2023."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_hf.loop.statistics import RoundRecord, SpecStats

from specdec_kernels.analysis import expected_tokens, walltime_factor

ORACLE_DRAFTS = 16  # no round of the oracle drafts more


@dataclass(frozen=True)
class Speed:
    """One row of Table 4, measured here at batch size 1.

    The first round of each text, which reads the prompt, is left out of all figures.

    Attributes:
        temperature, gamma, alpha: as in the table. Of trees gamma is the depth, and alpha is None.
        cost: c, time of one draft step in units of one plain step; of a tree, that of the whole.
        verification: v, time to verify the drafts of a round, with what a round does beside it, in
            the same units; the paper assumes 1.
        drafting: share of the rounds that drafted. A drafter that copies cannot always.
        expected_paper: Theorem 3.8, for rounds that all draft gamma tokens and v = 1; None for
            trees, for which it has no formula.
        expected: the same with measured v and share of rounds that drafted.
        measured: tokens per second over those of plain decoding.
        expected_tokens, measured_tokens: tokens per round; None where nothing is expected.
    """

    temperature: float
    gamma: int
    alpha: float | None
    cost: float
    verification: float
    drafting: float
    expected_paper: float | None
    expected: float | None
    measured: float
    expected_tokens: float | None
    measured_tokens: float


def compare_speed(
    plain: Sequence[SpecStats],
    speculative: Sequence[SpecStats],
    *,
    alpha: float | None,
    gamma: int,
    temperature: float,
) -> Speed | None:
    """A row of Table 4; None where no round after the first drafted anything.

    Args:
        plain, speculative: statistics of the same prompts without and with drafts, one sequence
            each.
        alpha: measured acceptance rate; None for trees.
        gamma: drafts per round, or the depth of trees.
        temperature: of both.
    """
    steps, rounds = later_rounds(plain), later_rounds(speculative)
    with_drafts = [r for r in rounds if r.drafted[0]]
    if not steps or not with_drafts:
        return None
    step = sum(r.seconds for r in steps) / _emitted(steps)
    drafts = len(with_drafts) if alpha is None else sum(r.drafted[0] for r in with_drafts)
    cost = sum(r.draft for r in with_drafts) / drafts / step
    verification = sum(r.target + r.after_target for r in with_drafts) / len(with_drafts) / step
    share = len(with_drafts) / len(rounds)
    tokens = expected = expected_paper = None
    if alpha is not None:
        tokens = share * expected_tokens(alpha, gamma) + 1 - share
        expected = tokens / (share * (gamma * cost + verification) + 1 - share)
        expected_paper = walltime_factor(alpha, gamma, cost)
    return Speed(
        temperature=temperature,
        gamma=gamma,
        alpha=alpha,
        cost=cost,
        verification=verification,
        drafting=share,
        expected_paper=expected_paper,
        expected=expected,
        measured=step / (sum(r.seconds for r in rounds) / _emitted(rounds)),
        expected_tokens=tokens,
        measured_tokens=_emitted(rounds) / len(rounds),
    )


def later_rounds(calls: Sequence[SpecStats]) -> list[RoundRecord]:
    """The rounds of calls of one sequence, without the first of each, which reads the prompt."""
    return [record for stats in calls for record in stats.round_log[1:]]


def _emitted(rounds: Sequence[RoundRecord]) -> int:
    return sum(record.emitted[0] for record in rounds)


@dataclass(frozen=True)
class Scheduled:
    """What one way to choose the number of drafts makes of a drafter.

    Attributes:
        schedule: its name; "oracle" drafts in each round just the tokens that are accepted.
        drafted, tokens: per round.
        factor: speed-up where a draft costs c plain steps and every verification 1, as Theorem 3.8
            assumes; the time that was measured has no part in it beside c.
        share: ``factor`` over that of the oracle.
    """

    schedule: str
    drafted: float
    tokens: float
    factor: float
    share: float


def compare_with_oracle(
    longest: Sequence[SpecStats], calls: dict[str, Sequence[SpecStats]], cost: float
) -> list[Scheduled]:
    """What each schedule leaves of the speed-up of an oracle for gamma (section 3.5).

    A round of rule token that drafted enough accepts as many tokens as the oracle would draft, and
    the next round begins at the same place. So the oracle's rounds are those of a constant large
    number of drafts, of which only the accepted ones are paid. Where a draft costs more than a
    plain step it drafts nothing.

    Args:
        longest: statistics with `ORACLE_DRAFTS` drafts in every round, one sequence each.
        calls: those of the schedules, of the same prompts, by name.
        cost: c.

    Returns:
        The oracle, then the schedules in their order. Nothing where no round followed the first.
    """
    rounds = later_rounds(longest)
    if not rounds:
        return []
    best = _scheduled("oracle", rounds, [r.accepted[0] for r in rounds], cost, None)
    if cost > 1:
        best = Scheduled("oracle", 0.0, 1.0, 1.0, 1.0)
    found = [best]
    for name, stats in calls.items():
        later = later_rounds(stats)
        if later:
            drafted = [r.drafted[0] for r in later]
            found.append(_scheduled(name, later, drafted, cost, best.factor))
    return found


def _scheduled(
    name: str,
    rounds: Sequence[RoundRecord],
    drafted: Sequence[int],
    cost: float,
    oracle: float | None,
) -> Scheduled:
    tokens = _emitted(rounds)
    factor = tokens / (len(rounds) + cost * sum(drafted))
    share = 1.0 if oracle is None else factor / oracle
    return Scheduled(name, sum(drafted) / len(rounds), tokens / len(rounds), factor, share)
