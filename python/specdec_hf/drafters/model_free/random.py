"""Random drafts, a baseline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec_hf.drafters.context import DraftContext
from specdec_hf.drafters.model_free.row_drafter import RowDrafter


class RandomDrafter(RowDrafter, entry="random"):
    """Draws every token of the vocabulary with the same probability.

    The target accepts one draft in V on average (V tokens in the vocabulary). It shows what
    speculation costs where nothing is accepted.

    Source: Leviathan et al. 2023, section 3.6.
    """

    rolls_back = True

    def start(self, context: DraftContext) -> None:
        super().start(context)
        # The distribution is uniform at every temperature; greedy calls too need random tokens.
        self.sampler.sampling |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        self._row = np.zeros(self.vocab_size, dtype=np.float32)

    def row(self, b: int, text: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._row
