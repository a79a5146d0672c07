"""The module of a head that drafts a block of mask tokens in one pass.

The head reads, beside the text, the embedding of one mask token in the place of each token that is
to be drafted. So a draft does not depend on the drafts before it, and its distribution is known
before any of them is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from specdec_hf.heads.eagle_family.head import DecoderHead
from specdec_hf.heads.eagle_family.layer import HeadLayer
from torch import nn
from torch.nn import functional

from specdec_papers.mask_tokens.config import BlockConfig


class BlockHead(DecoderHead):
    """Base class of such heads.

    Args:
        config: its sizes.
        fc: gives hidden states [B, n, H] from features.
        layers: the decoder layers.
        norm: of the hidden states, before the output matrix.
    """

    config: BlockConfig

    def __init__(
        self, config: BlockConfig, fc: nn.Module, layers: Sequence[HeadLayer], norm: nn.Module
    ) -> None:
        super().__init__(config, fc, norm)
        self.layers: Any = nn.ModuleList(layers)

    def embed(self, model: Any) -> Any:
        """What gives the embeddings of tokens: rows of a matrix, which no target scales."""
        rows = self.embeddings
        return partial(
            functional.embedding,
            weight=model.get_input_embeddings().weight if rows is None else rows,
        )

    def borrow(self, model: Any) -> None:
        if self.config.draft_vocab_size < self.config.vocab_size:
            super().borrow(model)
        else:
            self.lm_head = self.rows_of(model)
