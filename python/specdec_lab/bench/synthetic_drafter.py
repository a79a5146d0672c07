"""A drafter of a set acceptance rate, for the model of ``bench-synthetic`` that counts."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, StatelessDrafter


class SyntheticDrafter(StatelessDrafter):
    """Drafts the target's next token t + 1 with probability ``alpha``, else t + 2.

    Args:
        alpha: the acceptance rate.
        vocab_size: the target's, at which it begins again with 0.

    Attributes:
        random: what decides, from call to call.
    """

    name = "synthetic"

    def __init__(self, alpha: float, vocab_size: int) -> None:
        self.alpha = alpha
        self.vocab_size = vocab_size
        self.random = np.random.default_rng(0)

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft:
        gamma = int(limits.max())
        tokens = texts.last(1) + np.arange(1, gamma + 1)
        tokens += self.random.random(tokens.shape) >= self.alpha
        counts = np.full(len(tokens), gamma)
        return Draft(torch.from_numpy(tokens % self.vocab_size), counts=counts)
