"""Drafting chains by blockwise parallel decoding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec_hf.drafters.context import DraftContext, History
from specdec_hf.drafters.drafter import Draft, Drafter
from specdec_hf.drafters.heads.parallel_draft import ParallelDraft
from specdec_hf.drafters.heads.placed import PlacedHead
from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.parallel_files import load_blockwise

if TYPE_CHECKING:
    from typing_extensions import Self


class BlockwiseDrafter(Drafter):
    """Trained heads, each of which drafts its most likely token.

    Args:
        head: `BlockwiseHeads`, or the folder of some. They are not changed.

    Raises:
        TypeError: no heads.
        ValueError: a folder whose heads cannot be read, by name of what is wrong.

    Source: Stern et al. 2018, arXiv 1811.03115.
    """

    name = "blockwise"

    def __init__(self, head: BlockwiseHeads | str | Path) -> None:
        self._head = PlacedHead(head, BlockwiseHeads, load_blockwise)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """With the heads in a folder."""
        return cls(text)

    def check_config(self, config: Any) -> None:
        self._head.check_config(config)

    def start(self, context: DraftContext) -> None:
        """Place the heads on the target's device.

        Raises:
            ValueError: a target that the heads were not trained for.
        """
        self._draft = ParallelDraft(self._head.on(context.model), context)
        self.relative_cost = self._draft.relative_cost

    def propose(self, history: History, gamma: int) -> Draft | None:
        counts = self._draft.room(history, gamma)
        gamma = int(counts.max())
        if gamma < 1:
            return None
        states = self._draft.states()
        tokens = torch.cat([self._draft.top(states, k, 1) for k in range(gamma)], dim=1)
        return Draft(tokens, counts=counts)
