"""Blockwise parallel decoding: one feed-forward layer gives the states of all heads.

Source: Stern et al. 2018, arXiv 1811.03115, section 6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specdec_hf.heads.parallel import ParallelConfig, ParallelHeads


class BlockwiseHeads(ParallelHeads):
    """A layer with K hidden layers' width and K outputs, each added to the target's state.

    Args:
        config: its sizes.
    """

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        size, heads = config.target_hidden_size, config.num_heads
        self.hidden = nn.Linear(size, heads * config.inner)
        self.output = nn.Linear(heads * config.inner, heads * size)

    def states(self, final: torch.Tensor) -> torch.Tensor:
        made = self.output(self.hidden(final).relu())
        out: torch.Tensor = final[..., None, :] + made.unflatten(-1, (self.config.num_heads, -1))
        return out

    def begin_as(self, model: Any) -> None:
        """Zero outputs, so that every head first drafts what the target would say next."""
        with torch.no_grad():
            self.hidden.reset_parameters()
            self.output.weight.zero_()
            self.output.bias.zero_()
