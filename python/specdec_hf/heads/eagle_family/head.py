"""The module of a head over pairs: one decoder layer, whose output predicts the next token.

Terms:

- features: the target's hidden states of one token after the chosen layers, side by side.
- pair: the input of the head at one place: a token, and the features of the token before it or,
  from the second draft on, the head's own hidden state there. It gives the hidden state from which
  the next token is drafted.
- draft vocabulary: the target's tokens that the head can draft.

Source: EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_hf.heads.base import Head
from specdec_hf.heads.eagle_family.config import PairConfig
from specdec_hf.heads.eagle_family.layer import HeadLayer


class _Rotary(LlamaRotaryEmbedding):
    """Keeps its frequencies in float32 whatever dtype its head gets, as a loaded model does.

    In bfloat16 they would be off by up to 0.4 %, which is another angle after some hundred tokens.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # as PyTorch
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            self._buffers[name] = buffer.to(self._buffers[name].device)  # type: ignore[union-attr]
        return self


class DecoderHead(Head):
    """Base class of heads with decoder layers of their own over the target's features.

    Args:
        config: its sizes.
        fc: gives hidden states [B, n, H] from features.
        norm: of the hidden states, before the output matrix.

    Attributes:
        embeddings: [V, H] of the target's tokens, of the head's own; None takes the target's.
    """

    config: PairConfig
    embeddings: torch.Tensor | None

    def __init__(self, config: PairConfig, fc: nn.Module, norm: nn.Module) -> None:
        super().__init__(config.draft_vocab_size, config.layer.hidden_size)
        self.config = config
        self.fc, self.norm = fc, norm
        self.register_buffer("embeddings", None, persistent=False)
        self.rotary = _Rotary(config.layer)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, n, H] from features [B, n, layers * E]."""
        fused: torch.Tensor = self.fc(features)
        return fused

    def embed(self, model: Any) -> Any:
        """What gives the embeddings [..., H] of the target's tokens, given the target."""
        if self.embeddings is None:
            return model.get_input_embeddings()
        return partial(functional.embedding, weight=self.embeddings)

    def turns(
        self, places: torch.Tensor, rotary: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [B, 1, n, D] of the rotary embedding at places [B, n].

        Args:
            places: [B, n] int64.
            rotary: a copy in the place of the head's own, for one that changes with the text.
        """
        rotary = self.rotary if rotary is None else rotary
        cosines, sines = rotary(self.lm_head, places)
        return cosines[:, None], sines[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., draft_vocab_size] from hidden states [..., H]."""
        return functional.linear(self.norm(hidden), self.lm_head)

    def over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of the target's tokens, -inf where the head cannot draft a token."""
        full: torch.Tensor = logits.new_full(
            (*logits.shape[:-1], self.config.vocab_size), -torch.inf
        )
        full[..., self.tokens] = logits
        return full


class PairHead(DecoderHead):
    """A head with one decoder layer over pairs.

    Args:
        config: its sizes.
        fc: gives hidden states [B, n, H] from features.
        midlayer: the decoder layer.
        norm: of the hidden states, before the output matrix.
    """

    def __init__(
        self, config: PairConfig, fc: nn.Module, midlayer: HeadLayer, norm: nn.Module
    ) -> None:
        super().__init__(config, fc, norm)
        self.midlayer = midlayer
