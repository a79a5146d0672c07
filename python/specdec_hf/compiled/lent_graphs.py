"""CUDA graphs, and the buffers that they read and write, which one call at a time borrows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from specdec_hf.compiled.recorder import Recorder
from specdec_hf.compiled.recordings import Recordings

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer


class Borrower(Protocol):
    """A call, or what ends with it."""

    @property
    def held(self) -> bool:
        """Whether the call still runs."""
        ...


class LentGraphs(Recordings):
    """Base class: recordings over buffers that a user has until its call ends."""

    def __init__(self, recorder: Recorder, tolerance: float) -> None:
        super().__init__(recorder, tolerance)
        self._buffers: Sequence[Pair | None] = ()
        self._weights: tuple[int, ...] = ()  # addresses
        self._user: Callable[[], Any] = lambda: None
        self._borrower: Callable[[], Borrower | None] = lambda: None

    @property
    def user(self) -> Any:
        """The last one, also after its call, or None where it is gone."""
        return self._user()

    def refuse(self, reason: str) -> None:
        super().refuse(reason)
        self._buffers = ()

    def refusal(self, user: Any) -> str:
        """Why a user cannot have the buffers, or ""."""
        if self.reason:
            return self.reason
        if not self._recorder.here():
            return "the call runs on another CUDA stream than the first one"
        borrower = self._borrower()
        if self.user in (None, user) or borrower is None or not borrower.held:
            return ""
        return "another cache has the buffers that the graphs belong to"

    def begin(self, user: Any, borrower: Borrower, weights: tuple[int, ...]) -> None:
        """Let a user have the buffers until the call of the borrower ends.

        Args:
            user: a cache, or what drafts.
            borrower: the call.
            weights: addresses of all that graphs read beside their inputs and the buffers.
        """
        if weights != self._weights:
            self.clear()
        self._weights = weights
        self._user, self._borrower = weakref.ref(user), weakref.ref(borrower)

    def keep(self, buffers: Sequence[Pair | None]) -> None:
        """Record over these buffers from now on, and forget the graphs over others."""
        if _ids(buffers) != _ids(self._buffers):
            self.clear()
        self._buffers = buffers


def _ids(buffers: Sequence[Pair | None]) -> list[int]:
    return [id(x) for pair in buffers if pair is not None for x in pair]
