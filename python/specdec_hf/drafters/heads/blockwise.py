"""Drafting chains by blockwise parallel decoding."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.context import History
from specdec_hf.drafters.drafter import Draft
from specdec_hf.drafters.heads.parallel_draft import ParallelDrafter
from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.parallel_files import load_blockwise


class BlockwiseDrafter(ParallelDrafter[BlockwiseHeads], entry="blockwise"):
    """Trained heads, each of which drafts its most likely token.

    Args:
        head: `BlockwiseHeads`, or the folder of some. They are not changed.

    Raises:
        TypeError: no heads.
        ValueError: a folder whose heads cannot be read, by name of what is wrong.

    Source: Stern et al. 2018, arXiv 1811.03115.
    """

    kind, load = BlockwiseHeads, staticmethod(load_blockwise)

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        counts = self._draft.room(history, limits)
        gamma = int(counts.max())
        if gamma < 1:
            return None
        states = self._draft.states()
        tokens = torch.cat([self._draft.top(states, k, 1) for k in range(gamma)], dim=1)
        return Draft(tokens, counts=counts)
