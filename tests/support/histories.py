"""Committed tokens, as the loop shows them to a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from specdec_hf import History


def history_of(*texts: Sequence[int], active: Sequence[bool] | None = None) -> History:
    """The texts of one round; all sequences go on unless ``active`` says otherwise."""
    lengths = np.array([len(text) for text in texts])
    tokens = np.zeros((len(texts), lengths.max() + 5), dtype=np.int64)
    for b, text in enumerate(texts):
        tokens[b, : len(text)] = text
    return History(tokens, lengths, np.array([True] * len(texts) if active is None else active))
