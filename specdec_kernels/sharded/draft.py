"""Q, the distribution that the drafted tokens were drawn from, on the shard of this rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments.chain import ChainArguments
from ..arguments.checks import float32
from .distribution import RowStats, Shard, take_rows
from .sequence import Sequences


@dataclass
class DraftTables:
    """Q at each drafted token, which every rank knows alike: all [B, gamma].

    log_q: its log-probability. valid_at_token: all that is read to accept or reject the token is
    valid. valid: the whole row is; the residual needs all of it.
    """

    log_q: Tensor
    valid_at_token: Tensor
    valid: Tensor


class OneHotDraft:
    """A deterministic draft: Q is one-hot at the drafted token."""

    rows: Tensor | None = None  # [B, gamma, W] of logits, whose maxima the ranks exchange
    stats: RowStats | None = None

    def __init__(self, s: Sequences, shard: Shard) -> None:
        self.s, self.shard = s, shard

    def entries(self) -> Tensor:
        """[B, gamma, 2] int64 that are added up over the ranks."""
        return torch.zeros(*self.s.drafted.shape, 2, dtype=torch.int64, device=self.s.rows.device)

    def tables(self, added_up: Tensor) -> DraftTables:
        """added_up: the sum of `entries` over all ranks."""
        certain = torch.zeros(self.s.drafted.shape, device=added_up.device, dtype=torch.float64)
        yes = torch.ones_like(certain, dtype=torch.bool)
        return DraftTables(certain, yes, yes)

    def probs(self, index: Tensor) -> Tensor:
        """[B, M, W] float64, Q of rows `index` [B, M] of each sequence on this shard."""
        columns, inside = self.shard.local(self.s.drafted.gather(1, index))
        q = torch.zeros(*index.shape, self.shard.width, dtype=torch.float64, device=index.device)
        return q.scatter_(-1, columns[..., None], inside.double()[..., None])


class SparseDraft(OneHotDraft):
    """A few ids with their probabilities, which every rank is given alike."""

    def __init__(
        self, s: Sequences, shard: Shard, probs: Tensor, missing: Tensor, ids: Tensor
    ) -> None:
        super().__init__(s, shard)
        self.ids, self.q, self.missing = ids.long(), probs.double(), missing

    def tables(self, added_up: Tensor) -> DraftTables:
        at_token = self.q.where(self.ids == self.s.drafted[..., None], 0.0)
        valid = ((self.q.isfinite() & (self.q >= 0)) | (self.ids < 0)).all(-1) & ~self.missing
        return DraftTables(at_token.sum(-1).log(), valid, valid)

    def probs(self, index: Tensor) -> Tensor:
        columns, inside = self.shard.local(take_rows(self.ids, index))
        given = take_rows(self.q, index).where(inside, 0.0)
        q = torch.zeros(*index.shape, self.shard.width, dtype=torch.float64, device=index.device)
        return q.scatter_add_(-1, columns, given)


class LogitsDraft(OneHotDraft):
    """Logits at the target's temperature, unfiltered. `stats` is set when the maxima are known."""

    def __init__(self, s: Sequences, shard: Shard, rows: Tensor, missing: Tensor) -> None:
        super().__init__(s, shard)
        self.rows, self.missing = rows, missing

    def entries(self) -> Tensor:
        assert self.stats is not None
        sums = self.stats.sums(self.shard)
        return torch.stack([sums, self.stats.entries(self.s.drafted, self.shard)], -1)

    def tables(self, added_up: Tensor) -> DraftTables:
        assert self.stats is not None
        self.stats.add_up(added_up[..., 0], self.shard.vocab)
        valid = self.stats.valid & ~self.missing
        at_token = added_up[..., 1].contiguous().view(torch.float64)
        return DraftTables(at_token - self.stats.log_sum, valid, valid)

    def probs(self, index: Tensor) -> Tensor:
        assert self.stats is not None
        return self.stats.at(index).probs()


class SampledDraftShard(LogitsDraft):
    """Logits with the statistics that `sample` returned for the whole rows."""

    def __init__(
        self, s: Sequences, shard: Shard, rows: Tensor, missing: Tensor, a: ChainArguments,
        temperature: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(s, shard, rows, missing)
        assert a.draft_logsumexp is not None
        assert a.draft_threshold is not None
        self.logsumexp, self.threshold = a.draft_logsumexp, a.draft_threshold
        self.one_hot = (temperature == 0)[:, None]
        self.temperature = temperature.where(temperature > 0, 1.0)[:, None]

    def _logprobs(self, logits: Tensor, index: Tensor) -> Tensor:
        """log Q of logits [B, M, K] of rows `index` [B, M]."""
        logits = logits.double()
        scaled = logits / self.temperature[..., None] - self.logsumexp.gather(1, index)[..., None]
        return scaled.where(logits >= self.threshold.gather(1, index)[..., None], -torch.inf)

    def entries(self) -> Tensor:
        assert self.rows is not None
        columns, inside = self.shard.local(self.s.drafted)
        logits = self.rows.gather(-1, columns[..., None])
        every = torch.arange(inside.shape[1], device=inside.device).expand_as(columns)
        bits = self._logprobs(logits, every).view(torch.int64)
        finite = logits.double() < torch.inf  # false for NaN
        both = torch.cat([(~finite).long(), bits], -1)
        return both.where(inside[..., None], 0)

    def tables(self, added_up: Tensor) -> DraftTables:
        assert self.stats is not None
        known = self.logsumexp.isfinite() & ~self.threshold.isnan() & ~self.missing
        at_token = known & (added_up[..., 0] == 0) | self.one_hot
        log_q = added_up[..., 1].contiguous().view(torch.float64).where(~self.one_hot, 0.0)
        return DraftTables(log_q, at_token, at_token & (self.stats.valid | self.one_hot))

    def probs(self, index: Tensor) -> Tensor:
        assert self.rows is not None
        q = self._logprobs(take_rows(self.rows, index), index).exp()
        return torch.where(self.one_hot[..., None], OneHotDraft.probs(self, index), q)


def draft_temperature(a: ChainArguments, target: Tensor) -> Tensor:
    """[B] float64, the temperature of a draft with statistics, else the target's."""
    if a.draft_logsumexp is None:
        return target
    if a.draft_temperatures is not None:
        return a.draft_temperatures.double()
    return torch.full_like(target, float32(a.draft_temperature))


def draft_on_shard(
    a: ChainArguments, s: Sequences, shard: Shard, temperature: Tensor
) -> OneHotDraft:
    """The draft in the form in which it was given. temperature: of `draft_temperature`."""
    if a.draft is None:
        return OneHotDraft(s, shard)
    missing = torch.zeros_like(s.drafted, dtype=torch.bool)

    def dense(rows: Tensor) -> Tensor:
        """[B, gamma, K]; a ragged draft has one row less than the target for each sequence."""
        if not a.ragged_draft:
            return rows
        rows = rows if len(rows) else rows.new_zeros(1, rows.shape[-1])
        return rows[s.draft_rows.clamp(0, len(rows) - 1)]

    if a.ragged_draft:
        missing = (s.draft_rows < 0) | (s.draft_rows >= a.draft.shape[0])
    rows = dense(a.draft)
    if a.draft_ids is not None:
        return SparseDraft(s, shard, rows, missing, dense(a.draft_ids))
    if a.draft_logsumexp is not None:
        return SampledDraftShard(s, shard, rows, missing, a, temperature)
    return LogitsDraft(s, shard, rows, missing)
