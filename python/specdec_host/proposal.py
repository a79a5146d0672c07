"""What copying drafters return."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Proposal(NamedTuple):
    """Chains of tokens that may come next.

    Attributes:
        tokens: [count, gamma] int64, the best chain first; -1 after the end of a chain.
        confidence: [count, gamma] float32, estimated probability of each token after those before
            it: a token that followed a context of L tokens n of N times has n / (N + 2 / L), and
            the rest is left to tokens that never did. 0 after the end of a chain.
        match_length: number of tokens of the longest match, 0 where there is none.
    """

    tokens: NDArray[np.int64]
    confidence: NDArray[np.float32]
    match_length: int
