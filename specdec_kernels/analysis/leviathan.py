"""Printed figures of Leviathan et al. 2023 (arXiv 2211.17192), and what the formulas give of them.

Models and tasks have the names of the paper. Acceptance rates and costs are printed with two
digits, so that a factor that is computed from them may differ from the printed one in its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .walltime import operations_factor, optimal_gamma, walltime_factor

LENIENCES = (1.0, 0.5, 0.3, 0.1)  # the columns of Table 5
LENIENT_COST = 0.015  # c of the speed-ups in Appendix A.5
ARGMAX_GAMMA = 8  # of those at temperature 0


class Table1Row(NamedTuple):
    """Growth of the arithmetic operations and of the speed against plain decoding, at c = 0.

    alpha: acceptance rate.
    gamma: drafts per round.
    operations, speed: factors, Theorems 3.11 and 3.8.
    """

    alpha: float
    gamma: int
    operations: float
    speed: float


TABLE_1 = (  # as printed
    Table1Row(0.6, 2, 1.53, 1.96),
    Table1Row(0.7, 3, 1.58, 2.53),
    Table1Row(0.8, 2, 1.23, 2.44),
    Table1Row(0.8, 5, 1.63, 3.69),
    Table1Row(0.9, 2, 1.11, 2.71),
    Table1Row(0.9, 10, 1.60, 6.86),
)


def table_1() -> list[Table1Row]:
    """The rows of Table 1, computed.

    >>> [round(factor, 2) for factor in table_1()[0][2:]]
    [1.53, 1.96]
    """
    return [
        Table1Row(
            alpha, gamma, operations_factor(alpha, gamma, 0), walltime_factor(alpha, gamma, 0)
        )
        for alpha, gamma, _, _ in TABLE_1
    ]


class Table3Row(NamedTuple):
    """An acceptance rate of Table 3.

    target, drafter: the models.
    temperature: 0 for argmax, 1 for standard sampling.
    alpha: acceptance rate, Corollary 3.6.
    """

    target: str
    drafter: str
    temperature: int
    alpha: float


GPT_LIKE, T5, LAMDA = (
    ("unigram", "bigram", "GPT-like (6M)"),
    ("unigram", "bigram", "T5-small", "T5-base", "T5-large"),
    ("LaMDA (100M)", "LaMDA (2B)", "LaMDA (8B)"),
)
TABLE_3 = tuple(  # as printed
    Table3Row(target, drafter, temperature, alpha)
    for target, drafters, temperature, alphas in (
        ("GPT-like (97M)", GPT_LIKE, 0, (0.03, 0.05, 0.88)),
        ("GPT-like (97M)", GPT_LIKE, 1, (0.03, 0.05, 0.89)),
        ("T5-XXL (EnDe)", T5, 0, (0.08, 0.20, 0.75, 0.80, 0.82)),
        ("T5-XXL (EnDe)", T5, 1, (0.07, 0.19, 0.62, 0.68, 0.71)),
        ("T5-XXL (CNNDM)", T5, 0, (0.13, 0.23, 0.65, 0.73, 0.74)),
        ("T5-XXL (CNNDM)", T5, 1, (0.08, 0.16, 0.53, 0.55, 0.56)),
        ("LaMDA (137B)", LAMDA, 0, (0.61, 0.71, 0.75)),
        ("LaMDA (137B)", LAMDA, 1, (0.57, 0.71, 0.74)),
    )
    for drafter, alpha in zip(drafters, alphas, strict=True)
)


class Table4Row(NamedTuple):
    """A measured speed-up of T5-XXL, Tables 2 and 4.

    task, drafter: EnDe translates, CNNDM summarizes.
    temperature, gamma, alpha, cost: as in Theorem 3.8.
    expected: its factor.
    measured: the speed-up of Table 2.
    """

    task: str
    drafter: str
    temperature: int
    gamma: int
    alpha: float
    cost: float
    expected: float
    measured: float


TABLE_4 = (  # as printed; Table 2 is the same without cost and expected
    Table4Row("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    Table4Row("EnDe", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    Table4Row("EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    Table4Row("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    Table4Row("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    Table4Row("EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    Table4Row("CNNDM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    Table4Row("CNNDM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    Table4Row("CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    Table4Row("CNNDM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    Table4Row("CNNDM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    Table4Row("CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)


def fastest(speeds: Sequence[tuple[object, float]]) -> set[int]:
    """The places of the rows that Table 2 stars: in each group the largest speed-up.

    Args:
        speeds: group and speed-up of each row; the group is task and temperature.

    >>> fastest([("EnDe, 0", 3.4), ("EnDe, 0", 2.8), ("EnDe, 1", 2.6)])
    {0, 2}
    """
    best: dict[object, int] = {}
    for place, (group, speed) in enumerate(speeds):
        if group not in best or speed > speeds[best[group]][1]:
            best[group] = place
    return set(best.values())


class LenienceRow(NamedTuple):
    """The speed-up under a lenience, Appendix A.5, with T5-small drafting for T5-XXL at c = 0.015.

    temperature: 0 for argmax, where the drafts of a round are 8; the paper names no number of
        drafts for temperature 1.
    lenience, alpha: of Table 5, and of the text for argmax.
    gamma: drafts per round; computed rows of temperature 1 take the best number.
    speed: the factor of Theorem 3.8.
    """

    temperature: int
    lenience: float
    alpha: float
    gamma: int | None
    speed: float


LENIENCE_SPEEDS = tuple(  # as printed
    LenienceRow(temperature, lenience, alpha, gamma, speed)
    for temperature, gamma, alphas, speeds in (
        (0, ARGMAX_GAMMA, (0.75, 0.75, 0.8, 0.87), (3.3, 3.3, 3.9, 4.9)),
        (1, None, (0.62, 0.71, 0.76, 0.84), (2.5, 3.1, 3.6, 5.0)),
    )
    for lenience, alpha, speed in zip(LENIENCES, alphas, speeds, strict=True)
)


def lenience_speeds() -> list[LenienceRow]:
    """The rows of `LENIENCE_SPEEDS`, computed.

    Those of argmax have the printed digits. Those of temperature 1 are smaller than printed by 4 to
    8 %, whatever number of drafts is taken.

    >>> [round(row.speed, 2) for row in lenience_speeds()[:4]]
    [3.3, 3.3, 3.87, 4.91]
    """
    computed = []
    for row in LENIENCE_SPEEDS:
        gamma = optimal_gamma(row.alpha, LENIENT_COST) if row.gamma is None else row.gamma
        speed = walltime_factor(row.alpha, gamma, LENIENT_COST)
        computed.append(row._replace(gamma=gamma, speed=speed))
    return computed
