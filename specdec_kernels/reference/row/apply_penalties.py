"""Specification of `apply_penalties_`, one row at a time, in float32 as the rows are changed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...arguments.schema import OpArguments, named_by_schema
from .distribution import allowed, value_at


@named_by_schema("apply_penalties_")
class PenaltyArguments(OpArguments):
    """Shapes as in csrc/include/specdec/apply_penalties.h."""

    target: Tensor
    draft_token_ids: Tensor
    parents: Tensor | None
    target_indptr: Tensor | None
    token_counts: Tensor | None
    prompt_mask: Tensor | None
    repetition_penalties: Tensor | None
    repetition_penalty: float
    presence_penalties: Tensor | None
    presence_penalty: float
    frequency_penalties: Tensor | None
    frequency_penalty: float
    bias_ids: Tensor | None
    biases: Tensor | None
    min_new_tokens: Tensor | None
    eos_token_ids: Tensor | None


def apply_penalties_(*args: Any) -> None:
    """Takes its arguments in the order of the schema."""
    a = PenaltyArguments(*args)
    drafted = a.draft_token_ids.clone()
    for b, tokens in enumerate(drafted.tolist()):
        rows = list(range(len(tokens) + 1))
        if a.target_indptr is not None:
            n = a.target.shape[0]
            begin = min(max(int(a.target_indptr[b]), 0), n)
            end = min(max(int(a.target_indptr[b + 1]), begin), n)
            rows = list(range(begin, end))[: len(tokens) + 1]
        for i, row in enumerate(rows):
            at = a.target[b, row] if a.target_indptr is None else a.target[row]
            at.copy_(_penalised(a, b, at.float(), [tokens[n] for n in _path(a, b, i)]))


def _path(a: PenaltyArguments, b: int, i: int) -> list[int]:
    """The drafts before row i, from the last one upwards."""
    path, n = [], i - 1
    while n >= 0:
        path.append(n)
        parent = n - 1 if a.parents is None else int(a.parents[b, n])
        n = parent if parent < n else -1
    return path


def _penalised(a: PenaltyArguments, b: int, row: Tensor, drafts: list[int]) -> Tensor:
    v = len(row)
    repetition = value_at(a.repetition_penalties, a.repetition_penalty, b)
    presence = value_at(a.presence_penalties, a.presence_penalty, b)
    frequency = value_at(a.frequency_penalties, a.frequency_penalty, b)
    if not all(map(math.isfinite, (repetition, presence, frequency))) or repetition <= 0:
        return torch.full_like(row, math.nan)

    if a.bias_ids is not None and a.biases is not None:
        for token, bias in zip(a.bias_ids[b].tolist(), a.biases[b], strict=True):
            if 0 <= token < v:
                row[token] += bias
    if a.min_new_tokens is not None and a.eos_token_ids is not None:
        ends = [e for e in a.eos_token_ids.tolist() if 0 <= e < v]
        if len(drafts) < int(a.min_new_tokens[b]):
            row[ends] = -math.inf

    counts = torch.zeros(v) if a.token_counts is None else a.token_counts[b].clamp(min=0).float()
    for token in drafts:
        if 0 <= token < v:
            counts[token] += 1
    seen = counts > 0
    if a.prompt_mask is not None:
        seen = seen | allowed(a.prompt_mask[b], v)
    row = torch.where(seen, torch.where(row > 0, row / repetition, row * repetition), row)
    return torch.where(counts > 0, row - frequency * counts - presence, row)
