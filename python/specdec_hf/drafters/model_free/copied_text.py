"""The tokens that drafters copy from where a sequence repeats what it read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec_hf.drafters.context import DraftContext, History


class CopiedText:
    """The text of each sequence and, of an encoder-decoder, what its encoder read before it.

    Args:
        context: the call; None for sequences alone.
    """

    def __init__(self, context: DraftContext | None = None) -> None:
        self._read: list[NDArray[np.int64]] | None = None
        if context is not None and context.encoder is not None:
            config = context.model.config.get_text_config(decoder=True)
            self._read = context.encoder.texts(config.vocab_size)

    def of(self, history: History, b: int) -> NDArray[np.int64]:
        """[n] int64, the committed tokens of sequence ``b`` last."""
        committed = history.tokens[b, : history.lengths[b]]
        return committed if self._read is None else np.concatenate([self._read[b], committed])
