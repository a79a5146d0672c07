"""Heads that draft several tokens at once, each from the same final hidden state of the target.

Head k drafts the k-th token after the pending one, from the state before the pending token. It does
not know what the heads before it drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from specdec_hf.cache.protocol import vocab_size_of
from specdec_hf.heads.base import FinalStateConfig, Head


@dataclass(frozen=True)
class ParallelConfig(FinalStateConfig):
    """Sizes of such heads.

    Attributes:
        target_hidden_size: H, of the target's hidden states.
        num_heads: K, how many tokens are drafted.
        inner: number of residual blocks (Medusa), or width of the hidden layer for each head
            (blockwise parallel decoding).
        vocab_size: of the target; 0 where the file does not say.
        draft_vocab_size: how many of the target's tokens are drafted; 0 is all.
    """

    target_hidden_size: int
    num_heads: int
    inner: int
    vocab_size: int = 0
    draft_vocab_size: int = 0

    @classmethod
    def for_target(
        cls, model: Any, draft_vocab_size: int, num_heads: int, inner: int
    ) -> ParallelConfig:
        """Heads for a target."""
        size = model.config.get_text_config(decoder=True).hidden_size
        return cls(size, num_heads, inner, vocab_size_of(model), draft_vocab_size)


class ParallelHeads(Head):
    """Base class; override `states`.

    ``lm_head`` is the target's for all heads, or [K, V, H] with one for each.
    """

    config: ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config.draft_vocab_size, config.target_hidden_size)
        self.config = config

    def states(self, final: torch.Tensor) -> torch.Tensor:
        """What the output matrix reads, [..., K, H], from final hidden states [..., H]."""
        raise NotImplementedError

    def logits(self, states: torch.Tensor, k: int) -> torch.Tensor:
        """Logits [..., draft_vocab_size] of head k, from 0, given its states [..., H]."""
        return functional.linear(
            states, self.lm_head if self.lm_head.dim() == 2 else self.lm_head[k]
        )
