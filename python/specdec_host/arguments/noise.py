"""The positions at which drafts are drawn, as the rule that verifies them needs them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec_host.arguments import conversion
from specdec_host.arguments.arrays import Array, require_array, shape
from specdec_host.arguments.rules import ALL_RULES
from specdec_host.arguments.values import shown


def draft_positions(positions: Array, number: int, *, rule: str) -> NDArray[np.int64]:
    """The ``positions`` of `sample` for the drafts of one round.

    The arguments, the result and the errors are those of `specdec_kernels.draft_positions`.

    >>> (draft_positions(np.array([10]), 2, rule="token") - 10 >> 32).tolist()
    [[1, 2]]
    >>> draft_positions(np.array([10, 20]), 3, rule="match").tolist()
    [[10, 11, 12], [20, 21, 22]]
    """
    first = require_array(positions, "positions")
    number = conversion.require_integer(number, "number")
    if first.ndim != 1:
        raise RuntimeError(f"positions must be [B], got {shape(first)}")
    if first.dtype not in (np.int32, np.int64):
        raise RuntimeError(f"positions must be int32 or int64, got {first.dtype}")
    if not isinstance(rule, str):
        raise TypeError(f"rule must be a string, got {shown(rule)}")
    if rule not in ALL_RULES:
        raise ValueError(f"rule must be one of {', '.join(ALL_RULES)}, got {shown(rule)}")
    if number < 0:
        raise ValueError(f"number must be at least 0, got {number}")
    drafts = np.arange(number, dtype=np.int64)
    if rule != "match":
        drafts = (drafts + 1) << 32
    return first.astype(np.int64, copy=False)[:, None] + drafts
