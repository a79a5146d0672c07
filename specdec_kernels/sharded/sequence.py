"""What is known of each sequence before its rows are read, as tables over the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments.chain import ChainArguments
from ..arguments.checks import float32
from ..arguments.status import Status


@dataclass
class Parameters:
    """The sampling parameters of each sequence, [B] in float64 (top_k in int64).

    top_k, top_p: None where the argument turns the filter off for every sequence.
    in_range: no parameter of the sequence is out of range.
    """

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor
    in_range: Tensor

    @classmethod
    def of(cls, a: ChainArguments) -> Parameters:
        def vector(vector: Tensor | None, scalar: float) -> Tensor:
            if vector is not None:
                return vector.double()
            return torch.full_like(a.seeds, float32(scalar), dtype=torch.float64)

        t, k = vector(a.temperatures, a.temperature), vector(a.top_ks, a.top_k).long()
        p, m = vector(a.top_ps, a.top_p), vector(a.min_ps, a.min_p)
        in_range = t.isfinite() & (t >= 0) & (k >= 0)
        in_range &= (p > 0) & (p <= 1) & (m >= 0) & (m <= 1)
        return cls(
            t,
            None if a.top_ks is None and a.top_k == 0 else k,
            None if a.top_ps is None and float32(a.top_p) == 1 else p,
            m,
            in_range,
        )


@dataclass
class Sequences:
    """Tables over the B sequences of a batch.

    rows: [B, gamma+1] the row of the ragged target that verifies each draft, clamped to the target.
    draft_rows: [B, gamma] the same of a ragged draft; it may be out of range.
    drafted: [B, gamma] int64 the drafts to verify; meaningless from `num_drafts` on.
    num_drafts: [B]; drafts end before the first -1 or id out of range, and with an end-of-sequence
        token or the last token that may be emitted.
    no_bonus: [B], no token may follow the last draft.
    status: [B] of sequences that cannot be verified at all, else 0.
    status_after_drafts: [B], reported if all drafts are accepted.
    """

    rows: Tensor
    draft_rows: Tensor
    drafted: Tensor
    num_drafts: Tensor
    no_bonus: Tensor
    status: Tensor
    status_after_drafts: Tensor

    @property
    def verifiable(self) -> Tensor:
        return self.status == 0


def find_sequences(a: ChainArguments, in_range: Tensor, vocab: int) -> Sequences:
    """in_range: [B], whether the numbers that belong to a sequence are in range."""
    ids = a.draft_token_ids.long()
    b, gamma = ids.shape
    steps = torch.arange(gamma + 1, device=ids.device)
    begin = torch.arange(b, device=ids.device) * (gamma + 1)
    num_rows = torch.full_like(begin, gamma + 1)
    last_row = b * (gamma + 1) - 1
    if a.target_indptr is not None:
        n = a.target.shape[0]
        last_row = n - 1
        begin = a.target_indptr[:-1].long().clamp(0, n)
        end = a.target_indptr[1:].long().clamp(max=n)
        num_rows = (torch.maximum(end, begin) - begin).clamp(max=gamma + 1)
    if a.uniforms is not None:  # also those that no decision would read; NaN is out of range
        in_range = in_range & ((a.uniforms >= 0) & (a.uniforms < 1)).all(-1)
    status = torch.where(num_rows == 0, Status.TARGET_INVALID, 0)
    status = torch.where(in_range, status, Status.BAD_PARAMETER)

    most = num_rows if a.max_new_tokens is None else a.max_new_tokens.clamp(min=0)
    ends = torch.zeros_like(ids, dtype=torch.bool)
    if a.eos_token_ids is not None:
        ends = torch.isin(ids, a.eos_token_ids)
    # A draft is looked at if all before it are valid and none of them ended the sequence.
    may_follow = (steps[:-1] < num_rows[:, None] - 1) & (steps[:-1] < most[:, None])
    may_follow &= ends.long().cumsum(-1) - ends.long() == 0
    valid = (ids >= 0) & (ids < vocab)
    num_drafts = leading(valid & may_follow)
    stopped = take(torch.cat([ends.new_zeros(b, 1), ends], 1), num_drafts)
    no_bonus = (num_drafts == most) | stopped
    first_invalid = take(torch.cat([ids, ids.new_full((b, 1), -1)], 1), num_drafts)
    out_of_range = (first_invalid != -1) & (num_drafts < num_rows - 1) & ~no_bonus
    return Sequences(
        rows=(begin[:, None] + steps).clamp(0, max(last_row, 0)),
        draft_rows=begin[:, None] - torch.arange(b, device=ids.device)[:, None] + steps[:-1],
        drafted=ids,
        num_drafts=num_drafts,
        no_bonus=no_bonus,
        status=status,
        status_after_drafts=torch.where(out_of_range, Status.DRAFT_OUT_OF_RANGE, 0),
    )


def leading(mask: Tensor) -> Tensor:
    """[B] how many entries at the beginning of each row of [B, N] are true."""
    return mask.long().cumprod(-1).sum(-1)


def take(table: Tensor, index: Tensor) -> Tensor:
    """[B], entry `index` of each row of [B, N]."""
    return table.gather(1, index[:, None])[:, 0]
