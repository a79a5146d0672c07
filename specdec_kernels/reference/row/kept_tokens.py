"""Specification of `kept_tokens`: the tokens with P > 0, sorted; see docs/ops.md#kept-tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...arguments.kept_tokens import KeptTokensArguments
from ...arguments.status import Status
from .distribution import SequenceParams, TargetRow, allowed, masked, target_row

NOTHING = -746  # exp of it is 0 in float64


def kept_tokens(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes its arguments in the order of the schema."""
    a = KeptTokensArguments(*args)
    ids, logprobs, counts, status = outputs = a.new_outputs()
    for output, nothing in zip(outputs, (-1, -math.inf, 0, 0), strict=True):
        output.fill_(nothing)
    for at in (
        torch.cartesian_prod(*map(torch.arange, counts.shape)).view(-1, counts.dim()).tolist()
    ):
        b, n = at if len(at) == 2 else (at[0], 0)
        where = tuple(at)
        fault, row = _row(a, b, n if a.rows is None else int(a.rows[b, n]))
        status[where] = fault
        if row is None:
            continue
        kept = (row.logprobs - row.logprobs.max() >= NOTHING).nonzero()[:, 0]
        kept = kept[row.logprobs[kept].argsort(descending=True, stable=True)]
        counts[where] = len(kept)
        if len(kept) > a.max_kept:
            status[where] = Status.KEPT_CUT
        kept = kept[: a.max_kept]
        ids[where][: len(kept)] = kept
        logprobs[where][: len(kept)] = row.logprobs[kept].float()
    return outputs


def _row(a: KeptTokensArguments, b: int, i: int) -> tuple[int, TargetRow | None]:
    """The status of row i of sequence b, and its P if it has one."""
    if i == -1:
        return 0, None
    params = SequenceParams.of(a, b)
    if not params.in_range:
        return Status.BAD_PARAMETER, None
    rows, words = a.target, a.token_bitmask
    if a.target_indptr is not None:
        begin, end = a.target_indptr[b : b + 2].clamp(0, len(rows)).tolist()
    elif rows.dim() == 3:
        rows, words = rows[b], None if words is None else words[b]
        begin, end = 0, len(rows)
    else:
        begin, end = b, b + 1
    if not 0 <= i < end - begin:
        return Status.TARGET_INVALID, None
    bitmask = None if words is None else words[begin + i]
    rest = 0.0 if a.kind_name == "probs" else -math.inf
    values = masked(rows[begin + i].double(), bitmask, rest)
    row = target_row(values, a.kind_name, params, direct=False)
    if row.valid:
        return 0, row
    nothing = bitmask is not None and not allowed(bitmask, len(values)).any()
    return (Status.NOTHING_ALLOWED if nothing else Status.TARGET_INVALID), None
