"""The tables of Leviathan et al. 2023 (arXiv 2211.17192) that follow from formulas alone."""

from __future__ import annotations

from typing import NamedTuple

from specdec_kernels.analysis.walltime import operations_factor, walltime_factor

LENIENCES = (1.0, 0.5, 0.3, 0.1)  # the columns of Table 5


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
