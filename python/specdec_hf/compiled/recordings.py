"""Functions of tensors that are recorded once for each kind of inputs, and then replayed.

A recording has inputs of its own, to which new values are copied, and gives copies of its outputs.
It is compared with the function itself before it is used. One call at a time borrows the recordings
and the buffers that they read and write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from specdec_hf.cache.fit import compare
from specdec_hf.cache.own_logits import one_line
from specdec_hf.compiled.recorder import Recorder

# Widths, numbers of slots, and whether hidden states are wanted make fewer kinds than that.
MOST_RECORDINGS = 128
_PLAIN = (bool, int, float, str, type(None))
Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer


class Recording:
    """A recorded function.

    Args:
        recorder: of the device.
        function: gives tensors from inputs, some of which are tensors.
        inputs: those of the recording. Other inputs of a call must be alike: tensors of the same
            shapes and dtypes, and equal values in the other places.
    """

    def __init__(
        self,
        recorder: Recorder,
        function: Callable[[list[Any]], list[torch.Tensor]],
        inputs: Sequence[Any],
    ) -> None:
        self._inputs = [
            x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x
            for x in inputs
        ]
        self._outputs, self._replay = recorder.record(lambda: function(self._inputs))

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        for own, given in zip(self._inputs, inputs, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given, non_blocking=True)
        self._replay()
        # The next replay, of any recording, may write to the same memory.
        return [x.clone() for x in self._outputs]


class Recordings:
    """The recordings of functions, one for each kind of inputs.

    Args:
        recorder: of the device.
        tolerance: largest distance of logits that rounding explains.

    Attributes:
        reason: why nothing is recorded any more, or "".
    """

    def __init__(self, recorder: Recorder, tolerance: float) -> None:
        self.reason = ""
        self._recorder, self._tolerance = recorder, tolerance
        self._made: dict[Any, Recording] = {}

    def __len__(self) -> int:
        return len(self._made)

    def refuse(self, reason: str) -> None:
        """Record nothing any more."""
        self.reason = reason
        self.clear()

    def clear(self) -> None:
        """Forget all, because memory that they read or write has moved."""
        self._made.clear()

    def replay(
        self,
        function: Callable[[dict[str, Any]], list[torch.Tensor]],
        inputs: dict[str, Any],
        *more: Any,
    ) -> list[torch.Tensor] | None:
        """Replay a function, which is recorded first if its inputs are the first of their kind.

        Args:
            function: gives logits [..., V] and other tensors. What it reads beside ``inputs`` has
                the same memory in every call.
            inputs: by name, tensors among them, also in nested dicts.
            more: what else tells kinds apart.

        Returns:
            None where the function itself must run: nothing is recorded any more, or there are too
            many kinds.
        """
        leaves, structure = tree_flatten(inputs)
        settings = {_settings(x.device) for x in leaves if isinstance(x, torch.Tensor)}
        key = (str(structure), tuple(map(_kind, leaves)), frozenset(settings), more)
        made = self._made.get(key)
        if made is None:
            if self.reason or len(self._made) >= MOST_RECORDINGS:
                return None
            try:
                with _no_kept_casts():
                    made = self._record(lambda x: function(tree_unflatten(x, structure)), leaves)
            except Exception as error:
                self.refuse(one_line(error))
                return None
            self._made[key] = made
        return made(leaves)

    def _record(
        self, function: Callable[[list[Any]], list[torch.Tensor]], leaves: list[Any]
    ) -> Recording:
        """Record a function, and compare the logits of a replay with its own.

        Raises:
            Exception: it cannot be recorded; the message says why.
        """
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise TypeError(f"an input of the forward is a {type(leaf).__name__}")
        own = function(leaves)[:1]
        made = Recording(self._recorder, function, leaves)
        fault = compare(made(leaves)[:1], own, self._tolerance).fault
        if fault is not None:
            raise ValueError(f"logits of a replay differ from the forward's own {fault}")
        return made


def _kind(leaf: Any) -> Any:
    """What two inputs that share a recording have in common."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf if isinstance(leaf, _PLAIN) else None


def _settings(device: torch.device) -> tuple[Any, ...]:
    """Settings of PyTorch that choose other kernels."""
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
    )


@contextmanager
def _no_kept_casts() -> Iterator[None]:
    """Let autocast cast weights anew: it frees the casts that it keeps when its block ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


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
