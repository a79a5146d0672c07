"""The protocol of tree drafters; drafter.py says what they share with chain drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.context import History
from specdec_hf.drafters.drafter import DrafterBase
from specdec_kernels import SampledDraft


@dataclass
class TreeDraft:
    """A tree of drafted tokens for every sequence. A node's number is larger than its parent's.

    Attributes:
        tokens: [B, N] int64 on the host or the target's device; -1 is an absent node.
        parents: [B, N] int32 or int64 there, -1 for children of the root.
        depth: no node is deeper.
        distribution: rows [B, M, V] of the draft distributions, or None for deterministic drafts.
        draft_rows: [B, N] int32, which of these rows each node was drawn from.
        carried: [B, E] int64 on one of them. The loop reads it along with the verdict and gives it
            back in `TreeOutcome`.
        scores: [B, N] float32, the logarithm of the probability that the draft gives to the path
            down to each node, or None. A `TrieDrafter` chooses nodes by it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: int
    distribution: SampledDraft | None = None
    draft_rows: torch.Tensor | None = None
    carried: torch.Tensor | None = None
    scores: torch.Tensor | None = None


@dataclass
class TreeOutcome:
    """The part of a tree that was committed, on the host.

    Attributes:
        path: [B, D] int64, numbers of the committed nodes from the root down, then -1.
        tokens: [B, D] int64, their tokens, then -1.
        carried: [B, E] int64, as in the draft.
    """

    path: NDArray[np.int64]
    tokens: NDArray[np.int64]
    carried: NDArray[np.int64]


class TreeDrafter(DrafterBase, ABC):
    """Base class of tree drafters. A drafter serves one `generate` call at a time.

    Attributes:
        rules: acceptance rules that its trees can be verified with; the first is rule "auto" of
            sampled calls.
        size, depth: no tree has more nodes, or deeper ones.
    """

    name = "tree"
    rules: tuple[str, ...] = ("target_only", "match", "greedy")
    size = 0
    depth = 0

    @abstractmethod
    def propose(self, history: History, limits: NDArray[np.int64]) -> TreeDraft | None:
        """Draft a tree for every sequence, no deeper than ``limits[b]``; None drafts nothing.

        It should not read from the device, because the host then waits; the loop itself reads once
        a round.
        """

    def commit(self, lengths: NDArray[np.int64], outcome: TreeOutcome | None) -> None:
        """Learn the outcome of a round.

        Args:
            lengths: [B] tokens that each sequence had when it drafted.
            outcome: what was committed of the tree; None in a round without one.
        """
