"""The contract between the loop and whatever proposes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_kernels import SampledDraft

RATIO_RULES = ("token", "block")  # they compare with the law that the drafts were drawn from


@dataclass
class History:
    """The tokens of every row, without padding, on the host.

    Attributes:
        tokens: [B, C] int64, row ``b`` holds ``lengths[b]`` tokens, the rest is 0.
        lengths: [B] int64, committed tokens and the pending one.
        active: [B] bool, rows that still decode.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    active: NDArray[np.bool_]

    def last(self, size: int) -> NDArray[np.int64]:
        """[B, size], the last ``size`` tokens of each row, right aligned, filled with 0."""
        columns = self.lengths[:, None] - size + np.arange(size)
        taken = np.take_along_axis(self.tokens, np.maximum(columns, 0), axis=1)
        taken[columns < 0] = 0
        return taken


@dataclass
class Draft:
    """Proposed tokens and, where they were sampled, the law they were drawn from.

    Attributes:
        tokens: [B, gamma] int64 on any device; -1 ends a row's draft early.
        law: None for drafts that were not sampled (a point mass), else what `sample` left behind.
        counts: [B] drafts per row where the host knows them (no -1 inside), None for "all gamma".
    """

    tokens: torch.Tensor
    law: SampledDraft | None = None
    counts: NDArray[np.int64] | None = None


@dataclass
class DraftContext:
    """What a drafter may use of the call it serves.

    Attributes:
        model: the target.
        rule: acceptance rule of the loop.
        temperature, top_k, top_p, min_p: float or int, or a tensor [B] on the target's device.
        seeds: [B] int64 on the target's device.
        batch_size: rows B.
        max_length: no row will hold more tokens than this.
        max_gamma: no more tokens than this will be asked for at once.
    """

    model: Any
    rule: str
    temperature: float | torch.Tensor
    top_k: int | torch.Tensor
    top_p: float | torch.Tensor
    min_p: float | torch.Tensor
    seeds: torch.Tensor
    batch_size: int
    max_length: int
    max_gamma: int


class Drafter:
    """Base of all drafters. Override `propose`; the others have empty defaults.

    A drafter serves one `generate` call at a time: `start` resets it.
    """

    name = "custom"

    def start(self, context: DraftContext) -> None:
        """Begin a new call."""

    def propose(self, history: History, gamma: int) -> Draft | None:
        """Up to ``gamma`` next tokens for every row, or None when there is nothing to propose.

        Must not read from the device: the loop's one read per round is elsewhere.
        """
        raise NotImplementedError

    def commit(self, lengths: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Learn what stood: row ``b`` had ``lengths[b]`` tokens and kept ``accepted[b]`` drafts."""
