"""P of rows that are split between ranks: their statistics, which every rank knows alike.

Masses are fixed-point numbers in int64, so that their sums are exact: they have the same bits for
any number of ranks and any split of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .collectives import Collectives
from .filter import ordered_keys, thresholds, values_of_keys
from .sequence import Parameters

_WORD = 2**32 - 1
_CACHED = 2**18  # entries of rows that are worked on together on the CPU


@dataclass
class Shard:
    """The part [start, start + width) of a vocabulary that this rank holds.

    A rank without entries holds one column behind the vocabulary, of -inf in every row.
    """

    start: int
    width: int
    vocab: int

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of tokens in this shard, and whether they are in it; else column 0."""
        columns = tokens - self.start
        inside = (columns >= 0) & (columns < self.width)
        return columns.where(inside, 0), inside


def pack_maxima(logits: Tensor, shard: Shard) -> Tensor:
    """[B, N] int64 for logits [B, N, W]: the maximum, and below it the id that attains it.

    The maximum of such numbers over ranks is that of the row, with the lowest id on ties.
    """
    columns = logits.argmax(-1)
    keys = ordered_keys(logits.gather(-1, columns[..., None])[..., 0]).long()
    return (keys << 32) + (_WORD - columns - shard.start)


def unpack_maxima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(maxima float64, ids) of `pack_maxima`; the maximum of a row with a NaN is NaN."""
    return values_of_keys(packed >> 32).double(), _WORD - (packed & _WORD)


@dataclass
class RowStats:
    """Rows [B, N, W] of this rank, and the statistics [B, N] of the whole rows.

    Without meaning where not `valid`: where the row holds a NaN, +inf, or no finite logit.
    """

    logits: Tensor
    max: Tensor  # float64, of the raw logits
    argmax: Tensor
    valid: Tensor
    temperature: Tensor  # [B, 1] float64, 1 where the sequence is greedy
    threshold: Tensor  # float64, in units of the raw logits: survivors have logit >= threshold
    log_sum: Tensor  # of exp((logit - max) / temperature) over the survivors

    @classmethod
    def of(cls, logits: Tensor, packed: Tensor, temperature: Tensor) -> RowStats:
        """Before filters, and before the sum is known."""
        top, argmax = unpack_maxima(packed)
        return cls(
            logits, top, argmax, top.isfinite(), temperature,
            torch.full_like(top, -torch.inf), torch.zeros_like(top),
        )  # fmt: skip

    def filter(self, collectives: Collectives, p: Parameters, shard: Shard) -> None:
        """Finds the thresholds of the sampling parameters."""
        n = self.max.shape[1]
        found = thresholds(
            collectives,
            [
                (part.logits.flatten(0, 1), partial(part.flat_masses, shard))
                for part in self.parts()
            ],
            None if p.top_k is None else p.top_k.repeat_interleave(n),
            None if p.top_p is None else p.top_p.repeat_interleave(n),
            shard.vocab,
        )
        of_min_p = self.max + self.temperature * p.min_p.log()[:, None]
        self.threshold = torch.maximum(found.view(self.max.shape), of_min_p)

    def log_weights(self, logits: Tensor) -> Tensor:
        """(logit - max) / temperature of survivors, else -inf, for some logits of each row.

        logits: [B, N, K].
        """
        logits = logits.double()
        scaled = (logits - self.max[..., None]) / self.temperature[..., None]
        return scaled.where(logits >= self.threshold[..., None], -torch.inf)

    def masses(self, shard: Shard) -> Tensor:
        """[B, N, W] int64, the weights in fixed point; a row's sum is below 2**62.

        A weight is at most 1. All masses of a row that is not valid are 0.
        """
        weights = self.log_weights(self.logits).exp().where(self.valid[..., None], 0.0)
        return (weights * weight_unit(shard.vocab)).round().long()

    def flat_masses(self, shard: Shard) -> Tensor:
        """`masses` as [B * N, W]."""
        return self.masses(shard).flatten(0, 1)

    def sums(self, shard: Shard) -> Tensor:
        """[B, N] int64, the sum of `masses` over this shard."""
        return torch.cat([part.masses(shard).sum(-1) for part in self.parts()])

    def parts(self) -> list[RowStats]:
        """The rows of a few sequences at a time on the CPU, so that temporaries stay in its cache;
        all of them on other devices."""
        b, n, width = self.logits.shape
        few = max(1, _CACHED // max(1, n * width))
        if few >= b or self.max.device.type != "cpu":
            return [self]
        tables = (t.split(few) for t in vars(self).values())
        return [RowStats(*part) for part in zip(*tables, strict=True)]

    def entries(self, tokens: Tensor, shard: Shard) -> Tensor:
        """[B, N] int64, the bits of the log-weights of tokens [B, N]; 0 where another rank's."""
        columns, inside = shard.local(tokens)
        logits = self.logits.gather(-1, columns[..., None])
        bits = self.log_weights(logits)[..., 0].view(torch.int64)
        return bits.where(inside & self.valid, 0)

    def add_up(self, total: Tensor, vocab: int) -> None:
        """Takes the sum of `masses` over all ranks."""
        self.log_sum = (total.double() / weight_unit(vocab)).log()

    def at(self, index: Tensor) -> RowStats:
        """Some rows of each sequence: index [B, M]."""
        return RowStats(
            logits=take_rows(self.logits, index),
            max=self.max.gather(1, index),
            argmax=self.argmax.gather(1, index),
            valid=self.valid.gather(1, index),
            temperature=self.temperature,
            threshold=self.threshold.gather(1, index),
            log_sum=self.log_sum.gather(1, index),
        )

    def probs(self) -> Tensor:
        """[B, N, W] float64, P on this shard; 0 for rows that are not valid."""
        logprobs = self.log_weights(self.logits) - self.log_sum[..., None]
        return logprobs.exp().where(self.valid[..., None], 0.0)


def weight_unit(vocab: int) -> float:
    """How many units of fixed point are 1, such that the weights of a whole row fit in int64."""
    return 2.0 ** (61 - vocab.bit_length())


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """[B, M, W], rows `index` [B, M] of each sequence of [B, N, W]."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
