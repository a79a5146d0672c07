"""The committed tokens of a call, and the copy of them that drafters see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.drafting.context import History


@dataclass(frozen=True, eq=False)
class CommittedTokens(History):
    """The only store of committed tokens; the loop alone writes to it.

    A drafter gets other arrays with the same values. NumPy refuses writes to them, but a tensor
    that `torch.from_numpy` makes of such an array writes where it likes, and must not reach the
    text.
    """

    _shown: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shown", self.tokens.copy())

    def append(self, b: int, tokens: Sequence[int]) -> None:
        """Commit tokens of sequence ``b``."""
        begin = self.lengths[b]
        end = begin + len(tokens)
        self._grow(end)
        self.tokens[b, begin:end] = self._shown[b, begin:end] = tokens
        self.lengths[b] = end

    def adopt(self, b: int, other: CommittedTokens, index: int) -> None:
        """Hold the tokens of sequence ``index`` of another call as those of sequence ``b``."""
        length = other.lengths[index]
        self._grow(length)
        for held in (self.tokens, self._shown):
            held[b] = 0
            held[b, :length] = other.tokens[index, :length]
        self.lengths[b], self.active[b] = length, other.active[index]

    def _grow(self, columns: int) -> None:
        """Make the arrays as wide as so many columns, if they are not."""
        if columns > self.tokens.shape[1]:
            for name in ("tokens", "_shown"):
                held = getattr(self, name)
                grown = np.zeros((len(held), max(2 * held.shape[1], columns)), dtype=np.int64)
                grown[:, : held.shape[1]] = held
                object.__setattr__(self, name, grown)

    def shown(self) -> History:
        """The arrays for a drafter."""
        return History(
            _read_only(self._shown), _read_only(self.lengths.copy()), _read_only(self.active.copy())
        )


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
