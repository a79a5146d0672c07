"""The contract between the loop and whatever proposes tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_kernels import SampledDraft

# They compare with the law that the drafts were drawn from.
RULES_READING_DRAFT = (
    "token", "block", "multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq", "traversal",
)  # fmt: skip


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
        noise_from: None for noise that belongs to a token's position, else the first number of
            noise that belongs to the round, for rules that look ahead and for trees.
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
    noise_from: int | None = None


class Drafter(ABC):
    """Base of all drafters. Override `propose`; the others have empty defaults.

    A drafter serves one `generate` call at a time: `start` resets it.
    """

    name = "custom"

    def start(self, context: DraftContext) -> None:
        """Begin a new call."""

    @abstractmethod
    def propose(self, history: History, gamma: int) -> Draft | None:
        """Up to ``gamma`` next tokens for every row, or None when there is nothing to propose.

        Must not read from the device: the loop's one read per round is elsewhere.
        """

    def commit(self, lengths: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """Learn what stood: row ``b`` had ``lengths[b]`` tokens and kept ``accepted[b]`` drafts."""


@dataclass
class TreeDraft:
    """A proposed tree, one round's. Nodes are in topological order.

    Attributes:
        tokens: [B, N] int64 on the target's device; -1 is an absent node.
        parents: [B, N] int32 or int64 there, -1 for children of the root.
        depth: no node is deeper.
        law: the laws that nodes were drawn from, rows [B, M, V], or None for point masses.
        draft_rows: [B, N] int32, the row of each node's law.
        note: [B, E] int64 on the target's device, what the drafter wants to read with the verdict.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: int
    law: SampledDraft | None = None
    draft_rows: torch.Tensor | None = None
    note: torch.Tensor | None = None


@dataclass
class TreeOutcome:
    """What stood of a proposed tree, on the host.

    Attributes:
        path: [B, D] int64, the accepted nodes that were kept, then -1.
        tokens: [B, D] int64, their tokens, then -1.
        note: [B, E] int64, as in the draft.
    """

    path: NDArray[np.int64]
    tokens: NDArray[np.int64]
    note: NDArray[np.int64]


class TreeDrafter(ABC):
    """Base of what proposes trees. It serves one `generate` call at a time.

    Attributes:
        rules: the acceptance rules that its trees are drawn for; the first is "auto" of sampling.
        size, depth: no tree has more nodes, or deeper ones.
    """

    name = "tree"
    rules: tuple[str, ...] = ("target_only", "match", "greedy")
    size = 0
    depth = 0

    def start(self, context: DraftContext) -> None:
        """Begin a new call."""

    @abstractmethod
    def propose(self, history: History, limits: NDArray[np.int64]) -> TreeDraft | None:
        """A tree for every row, no deeper than ``limits[b]``, or None for none at all.

        Must not wait for the device: the loop's one read per round is elsewhere.
        """

    def commit(self, lengths: NDArray[np.int64], outcome: TreeOutcome | None) -> None:
        """Learn what stood: row ``b`` had ``lengths[b]`` tokens. None: no tree was proposed."""


def absent_beyond(
    tokens: torch.Tensor, depths: torch.Tensor, limits: NDArray[np.int64]
) -> torch.Tensor:
    """Tokens [B, N] with -1 where the depth [B, N] or [1, N] is larger than the row's limit."""
    bounds = torch.from_numpy(limits.copy()).to(tokens.device, non_blocking=True)
    return tokens.masked_fill(depths > bounds[:, None], -1)


def check_draft(drafter: Drafter, draft: Draft, rows: int, gamma: int) -> None:
    """Raises ValueError if a chain of drafts has a wrong shape."""
    shape = list(draft.tokens.shape)
    if len(shape) != 2 or shape[0] != rows or not 0 < shape[1] <= gamma:
        raise ValueError(
            f"{type(drafter).__name__}.propose must return tokens [{rows}, 1..{gamma}], got {shape}"
        )
