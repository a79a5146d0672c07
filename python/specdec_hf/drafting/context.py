"""The committed tokens, their hidden states and the target's candidates, for drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.runner.protocol import HiddenStates, Lengths, to_device


@dataclass(frozen=True, eq=False)
class History:
    """The committed tokens of every sequence, without padding, on the host.

    NumPy refuses a drafter's writes to the arrays that it gets, and the loop reads none of them.

    Attributes:
        tokens: [B, C] int64; sequence ``b`` holds ``lengths[b]`` tokens, and zeros follow them.
        lengths: [B] int64, number of committed tokens, the pending one included.
        active: [B] bool, sequences that have not ended.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    active: NDArray[np.bool_]

    @cached_property
    def drawn(self) -> dict[int, set[int]]:
        """By calls, which drafts were drawn after these texts; see `DrafterCall.draw`."""
        return {}

    def lengths_on(self, device: torch.device) -> torch.Tensor:
        """``lengths`` as a tensor on a device."""
        placed: dict[torch.device, torch.Tensor] = self.__dict__.setdefault("_placed", {})
        if device not in placed:
            placed[device] = to_device(self.lengths, device)
        return placed[device]

    def last(self, size: int) -> NDArray[np.int64]:
        """[B, size], a copy of each sequence's last ``size`` tokens; zeros precede short ones."""
        columns = self.lengths[:, None] - size + np.arange(size)
        taken = np.take_along_axis(self.tokens, np.maximum(columns, 0), axis=1)
        taken[columns < 0] = 0
        return taken


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

    def take(self, b: int, other: CommittedStates, index: int) -> None:
        """Keep the states of sequence ``index`` of another call as those of sequence ``b``."""
        for _, counts in self._rounds:
            counts[b] = 0
        for states, counts in other._rounds:
            taken = np.zeros_like(self._known)
            taken[b] = counts[index]
            self._rounds.append((states[index : index + 1].expand(len(taken), -1, -1), taken))
        self._known[b] = other._known[index]

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

    def pop(self) -> tuple[torch.Tensor, NDArray[np.int64]]:
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

    def pop_first(self, size: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """As `pop`, but of each sequence at most ``size`` tokens; its last one always waits."""
        states, counts = self.pop()
        taken = np.clip(counts - 1, 0, size)
        left = counts - taken
        columns = taken[:, None] + np.arange(left.max())
        self._rounds = [(_at([states], np.minimum(columns, states.shape[1] - 1)), left)]
        return states[:, : taken.max()], taken


def _at(states: list[torch.Tensor], columns: NDArray[np.int64]) -> torch.Tensor:
    """Gather columns [B, n] of each layer's states and join them; -1 gives any state."""
    if (columns == np.arange(columns.shape[1])).all():
        return torch.cat([layer[:, : columns.shape[1]] for layer in states], dim=-1)
    # Two indices would wake PyTorch's threads, which then spin beside those of the next forward.
    numbers = states[0].shape[1] * np.arange(len(columns))[:, None] + columns.clip(0)
    rows = to_device(numbers.flatten(), states[0].device)
    taken = [layer.flatten(0, 1).index_select(0, rows) for layer in states]
    return torch.cat(taken, dim=-1).view(*columns.shape, -1)


def _first(columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Move the columns that are not -1 to the front of each row, and count them."""
    order = np.argsort(columns < 0, axis=1, kind="stable")
    counts = (columns >= 0).sum(axis=1)
    return np.take_along_axis(columns, order, axis=1)[:, : counts.max()], counts


@dataclass
class Candidates:
    """The target's most likely next tokens after every token that a round fed to it, on the host.

    Row 0 belongs to the pending token, and row n + 1 to draft n. In a `TrieTree` that holds for
    drafters of trees, and other drafters' tokens follow; a drafter of chains finds its rows by
    `path`.

    Attributes:
        tokens: [B, N+1] int64, the pending token and the drafts; -1 is an absent draft.
        parents: [B, N+1] int64, the row of the token before it; -1 for the pending token.
        ids: [B, N+1, k] int64, next tokens by falling logit, after penalties and other logits
            processors. A row of an absent draft has no meaning.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    ids: NDArray[np.int64]

    def first(self, count: int) -> Candidates:
        """Only the ``count`` most likely next tokens of each row."""
        return Candidates(self.tokens, self.parents, self.ids[:, :, :count])

    def path(self, b: int, following: Sequence[int]) -> list[int]:
        """Rows of sequence ``b`` from the pending token down, as far as the drafts go.

        Args:
            b: the sequence.
            following: the tokens that were committed after the pending token.
        """
        rows = [0]
        for token in following:
            children = (self.parents[b] == rows[-1]) & (self.tokens[b] == token)
            if not children.any():
                break
            rows.append(int(children.argmax()))
        return rows
