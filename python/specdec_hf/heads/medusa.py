"""Medusa: residual blocks over the target's final hidden state, one stack for each head.

Source: Cai et al. 2024, arXiv 2401.10774, section 2.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specdec_hf.heads.parallel import ParallelConfig, ParallelHeads


class MedusaHeads(ParallelHeads):
    """K stacks of residual blocks x + SiLU(W x + b).

    Args:
        config: its sizes.

    Attributes:
        weights: [blocks, K, H, H].
        biases: [blocks, K, H].
    """

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        size, shape = config.target_hidden_size, (config.inner, config.num_heads)
        self.weights = nn.Parameter(torch.zeros(*shape, size, size))
        self.biases = nn.Parameter(torch.zeros(*shape, size))

    def states(self, final: torch.Tensor) -> torch.Tensor:
        x = final[..., None, :].expand(*final.shape[:-1], self.config.num_heads, -1)
        for weights, biases in zip(self.weights, self.biases, strict=True):
            x = x + functional.silu(torch.einsum("...ki,koi->...ko", x, weights) + biases)
        return x

    def begin_as(self, model: Any) -> None:
        """Zero weights, so that every head first drafts what the target would say next."""
        with torch.no_grad():
            self.weights.zero_()
            self.biases.zero_()
