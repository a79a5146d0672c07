"""Hidden states of the forwards of a runner, kept until the loop or a drafter takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.protocol import HiddenStates, Lengths


class CommittedStates:
    """Collects the states of every committed token that the target has read, until they are taken.

    The pending token has none yet. Tokens whose forward was not seen, such as those of a cache that
    the caller gave, are left out at the beginning of a sequence.

    Args:
        layers: after how many layers the states are read, in the order that they are given in.
        known: [B], how many tokens of each sequence need no states.
    """

    def __init__(self, layers: Sequence[int], known: Lengths) -> None:
        self.layers = tuple(layers)
        self._known = known.copy()
        self._rounds: list[tuple[torch.Tensor, NDArray[np.int64]]] = []

    @property
    def counts(self) -> NDArray[np.int64]:
        """[B], how many tokens of each sequence wait to be taken."""
        waiting = [counts for _, counts in self._rounds]
        return np.sum(waiting, axis=0) if waiting else np.zeros_like(self._known)

    def record(
        self, hidden: HiddenStates, lengths: Lengths, rows: NDArray[np.int64], scored: int
    ) -> None:
        """Keep the states of the tokens that a round has read and committed.

        Args:
            hidden: of the round's forward, or empty.
            lengths: [B], tokens that each sequence had when the round began, the pending one
                included.
            rows: [B, n], which rows of logits the emitted tokens were chosen from, then -1.
            scored: number of the rows of logits, which belong to the last columns of the forward.
        """
        emitted = (rows >= 0).sum(axis=1)
        if hidden:
            before = hidden[self.layers[0]].shape[1] - scored
            columns, counts = rows, emitted
            if before:
                # Column `before` holds the pending token, at position lengths - 1.
                positions = lengths[:, None] - 1 - before + np.arange(before)
                new = (positions >= self._known[:, None]) & (emitted > 0)[:, None]
                earlier = np.where(new, np.arange(before), -1)
                later = np.where(rows < 0, -1, rows + before)
                columns, counts = _first(np.concatenate([earlier, later], axis=1))
            states = [hidden[layer] for layer in self.layers]
            self._rounds.append((_at(states, columns[:, : counts.max()]), counts))
        self._known = np.where(emitted > 0, lengths - 1 + emitted, self._known)

    def take(self) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """States [B, n, layers * H] of the tokens since the last call, and [B] how many they are.

        The rows of a sequence come first, those after them have no meaning. Raises IndexError where
        nothing was recorded.
        """
        rounds, self._rounds = self._rounds, []
        if len(rounds) == 1:
            return rounds[0]
        columns, end = [], 0
        for states, counts in rounds:
            numbers = np.arange(states.shape[1])
            columns.append(np.where(numbers < counts[:, None], end + numbers, -1))
            end += states.shape[1]
        taken, counts = _first(np.concatenate(columns, axis=1))
        return _at([torch.cat([states for states, _ in rounds], dim=1)], taken), counts


def _at(states: list[torch.Tensor], columns: NDArray[np.int64]) -> torch.Tensor:
    """Gather columns [B, n] of each layer's states and join them; -1 gives any state."""
    device = states[0].device
    taken = torch.from_numpy(columns.clip(0)).to(device, non_blocking=True)
    sequences = torch.arange(len(columns), device=device)[:, None]
    return torch.cat([layer[sequences, taken] for layer in states], dim=-1)


def _first(columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Move the columns that are not -1 to the front of each row, and count them."""
    order = np.argsort(columns < 0, axis=1, kind="stable")
    counts = (columns >= 0).sum(axis=1)
    return np.take_along_axis(columns, order, axis=1)[:, : counts.max()], counts
