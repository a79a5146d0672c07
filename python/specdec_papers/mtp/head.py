"""The module of native multi-token prediction: decoder layers of the target's own class over pairs.

Terms:

- pair: the input of a layer at one place i: a token, and the hidden state of token i. Layer k of
  several, counted from 0, reads token i + k + 1 and predicts token i + k + 2.
- hidden state: layer 0 reads the target's final one, which follows the target's final norm. Layer k
  reads the output of layer k - 1 after that layer's own norm, which is also what the output matrix
  reads. Later drafts read the output of the last layer in the same way.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from specdec_hf.heads.base import WholeVocabularyHead
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class MtpConfig:
    """Sizes of the layers.

    Attributes:
        layer: the configuration of a decoder of these layers alone.
        layers: after how many of the target's layers the hidden state is read: all of them.
    """

    layer: Any
    layers: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        size: int = self.layer.vocab_size
        return size

    @property
    def target_hidden_size(self) -> int:
        """Of the target's hidden states."""
        size: int = self.layer.hidden_size
        return size

    def for_layers(self, total: int) -> MtpConfig:
        """With the final hidden state of a target of ``total`` layers, which follows its norm."""
        return replace(self, layers=(total,))


class MtpBlock(nn.Module):
    """One layer of multi-token prediction.

    Args:
        layer: a decoder layer of Transformers.
        norm: the class of the target's norms.
        config: of the decoder that the layer belongs to.

    Attributes:
        embeddings: [V, H] of its own; None takes the target's.
        lm_head: [V, H], the output matrix of its own; None takes the target's.
    """

    embeddings: torch.Tensor | None
    lm_head: torch.Tensor | None

    def __init__(self, layer: nn.Module, norm: Any, config: Any) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (norm(size, eps=epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = layer
        self.register_buffer("embeddings", None, persistent=False)
        self.register_buffer("lm_head", None, persistent=False)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, **inputs: Any
    ) -> torch.Tensor:
        """The normalised hidden states [B, n, H] of n pairs.

        Args:
            embeddings: [B, n, H] of their tokens.
            hidden: [B, n, H].
            inputs: what the decoder layer takes beside its input.
        """
        joined = torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1)
        out: torch.Tensor = self.norm(self.layer(self.eh_proj(joined), **inputs))
        return out


class MtpHead(WholeVocabularyHead):
    """The layers of multi-token prediction of one checkpoint.

    Args:
        config: their sizes.
        blocks: one layer or several; draft step k is drafted by layer k, or by the last one.
    """

    config: MtpConfig

    def __init__(self, config: MtpConfig, blocks: Sequence[MtpBlock]) -> None:
        super().__init__(config.target_hidden_size)
        self.config = config
        self.blocks = nn.ModuleList(blocks)

    def block(self, layer: int) -> MtpBlock:
        """A layer, counted from 0."""
        block = self.blocks[layer]
        assert isinstance(block, MtpBlock)
        return block

    def embed(self, model: Any, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., H] of tokens, those that a layer reads, given the target."""
        own = self.block(layer).embeddings
        if own is not None:
            return functional.embedding(tokens, own)
        taken: torch.Tensor = model.get_input_embeddings()(tokens)
        return taken

    def logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] from the hidden states [..., H] that a layer gave."""
        own = self.block(layer).lm_head
        return functional.linear(hidden, self.lm_head if own is None else own)

    def borrow(self, model: Any) -> None:
        """Take the target's output matrix, and run experts in the way that it does."""
        super().borrow(model)
        experts = "_experts_implementation"
        chosen = getattr(model.config.get_text_config(decoder=True), experts, None)
        if chosen is not None:
            setattr(self.config.layer, experts, chosen)

    def share_with(self, model: Any) -> None:
        """Drop embeddings and output matrices that are the target's, as published ones are."""
        taken = {
            "embeddings": model.get_input_embeddings().weight,
            "lm_head": model.get_output_embeddings().weight,
        }
        for block in self.blocks:
            for name, weight in taken.items():
                own = getattr(block, name)
                if own is not None and torch.equal(own.to(weight), weight):
                    setattr(block, name, None)
