"""The interface that the decoding loop needs of a KV cache.

Transformers' caches roll back a whole batch by one common number of tokens. In speculative decoding
each sequence of a batch keeps another number of drafts, so a cache of the loop is truncated to one
length per sequence. Terms of this package:

- slot: the place of one token's key and value; in `SpecCache`, token ``t`` of a sequence lies in
  slot ``t``.
- window: the tokens that one forward adds to the cache.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


class RollbackCache(Protocol):
    """A KV cache that forgets rejected drafts sequence by sequence.

    Attributes:
        kind: the name of this kind of cache, as in `make_cache`.
        lengths: [B] int64, committed tokens of each sequence that the cache holds.
    """

    kind: str

    @property
    def lengths(self) -> Lengths: ...

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Run the model over the next tokens of every sequence and cache their keys and values.

        Args:
            tokens: [B, n] int64 on the model's device. The cache holds ``starts[b] + n`` tokens of
                sequence ``b`` afterwards.
            starts: [B] position of each sequence's first token; a negative one is left padding.
            keep: how many rows of logits to return, counted from the end.

        Returns:
            Logits [B, keep, V].
        """
        ...

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of sequence ``b``."""
        ...


def vocab_size_of(model: Any) -> int:
    """The number of token ids of a model, or of a configuration."""
    config = getattr(model, "config", model)
    size: int = config.get_text_config(decoder=True).vocab_size
    return size


def num_parameters(module: Any) -> int:
    """The number of parameters of a module; those that several of its modules share count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def context_length(model: Any) -> int | None:
    """The number of positions the model was made for, None when its config does not say."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    # Some configs say -1, or nothing at all, where positions are relative.
    return length if isinstance(length, int) and length > 0 else None
