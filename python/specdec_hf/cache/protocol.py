"""The interface that the decoding loop needs of a KV cache.

Transformers' caches roll back a whole batch by one common number of tokens. In speculative decoding
each sequence of a batch keeps another number of drafts, so a cache of the loop is truncated to one
length per sequence. Terms of this package:

- slot: the place of one token's key and value; token ``t`` of a sequence lies in slot ``t``.
- window: the tokens that one forward adds to the cache.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


class RollbackCache(Protocol):
    """A KV cache that forgets rejected drafts sequence by sequence.

    Attributes:
        lengths: [B] int64, committed tokens of each sequence that the cache holds.
        later_inputs: a `LaterInputs` where the model's own methods made the prefill, else None.
    """

    lengths: Lengths
    later_inputs: Any

    def window(self, starts: Lengths, size: int) -> dict[str, Any]:
        """Inputs of the model's forward for the next ``size`` tokens of every sequence."""
        ...

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of sequence ``b``."""
        ...


def context_length(model: Any) -> int | None:
    """The number of positions the model was made for, None when its config does not say."""
    config = model.config.get_text_config(decoder=True)
    length: int | None = getattr(config, "max_position_embeddings", None)
    return length
