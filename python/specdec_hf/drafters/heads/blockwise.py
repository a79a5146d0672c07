"""Drafting chains by blockwise parallel decoding."""

from __future__ import annotations

import torch

from specdec_hf.drafters.context import History
from specdec_hf.drafters.drafter import Draft, Drafter
from specdec_hf.drafters.heads.parallel_draft import ParallelDrafter
from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.parallel_files import load_blockwise


class BlockwiseDrafter(ParallelDrafter[BlockwiseHeads], Drafter):
    """Trained heads, each of which drafts its most likely token.

    Args:
        head: `BlockwiseHeads`, or the folder of some. They are not changed.

    Raises:
        TypeError: no heads.
        ValueError: a folder whose heads cannot be read, by name of what is wrong.

    Source: Stern et al. 2018, arXiv 1811.03115.
    """

    name = "blockwise"
    kind, load = BlockwiseHeads, staticmethod(load_blockwise)

    def propose(self, history: History, gamma: int) -> Draft | None:
        counts = self._draft.room(history, gamma)
        gamma = int(counts.max())
        if gamma < 1:
            return None
        states = self._draft.states()
        tokens = torch.cat([self._draft.top(states, k, 1) for k in range(gamma)], dim=1)
        return Draft(tokens, counts=counts)
