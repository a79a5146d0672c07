"""The status word of a sequence: one bit for each fault that its data may hold."""

from __future__ import annotations

from enum import IntFlag


class Status(IntFlag):
    """Faults of one sequence. No op raises for data; tokens accepted before a fault are kept.

    >>> Status(5)
    <Status.TARGET_NOT_FINITE|EMPTY_RESIDUAL: 5>
    """

    TARGET_NOT_FINITE = 1  # a target row is not finite or missing: no token is emitted there
    DRAFT_NOT_FINITE = 2  # a draft row is not finite: treated as no draft
    EMPTY_RESIDUAL = 4  # nothing is left of the target: its distribution is sampled instead
    DRAFT_OUT_OF_RANGE = 8  # a drafted id is out of range: treated as -1
    BAD_PARAMETER = 16  # a sampling parameter is out of range: nothing is emitted
