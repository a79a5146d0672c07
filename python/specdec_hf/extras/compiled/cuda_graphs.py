"""Forwards as CUDA graphs: what records them, and the buffers that graphs belong to.

A CUDA graph launches the kernels of a whole forward in one call. It holds every Python number as it
was when it was recorded, and reads and writes the memory of then. So inputs are copied to those of
the recording, outputs are copied from it, and the buffers of keys and values outlive the calls:
each call borrows them. A graph is recorded at the first forward of its kind and compared there with
the forward itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache

from specdec_hf.runner.comparison import compare
from specdec_hf.runner.forwards import Borrower, ForwardPolicy, is_long
from specdec_hf.runner.protocol import DEFERRED, EPILOGUE
from specdec_hf.runner.self_check import one_line
from specdec_hf.runner.spec_cache import Cursor, SpecCache, SpecLayer
from specdec_hf.runner.spec_runner import SpecRunner, last_rows

Run = Callable[[], list[torch.Tensor]]


class Recorder(Protocol):
    """Records what functions do on a device."""

    def record(self, run: Run) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """The outputs of a function, and what computes them again, in place, from its inputs.

        Raises:
            Exception: the function reads from the device, or does what cannot be recorded.
        """
        ...

    def here(self) -> bool:
        """Whether work goes where recordings are replayed, behind the work before."""
        ...


class CudaRecorder:
    """Records CUDA graphs, which share memory for what is neither input nor output.

    Args:
        device: a CUDA device.
    """

    # PyTorch can record one graph of a process at a time.
    _recording = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._stream = torch.cuda.current_stream(device)

    def here(self) -> bool:
        return torch.cuda.current_stream(self._device) == self._stream

    def record(self, run: Run) -> tuple[list[torch.Tensor], Callable[[], None]]:
        with self._recording, torch.cuda.device(self._device):
            # Libraries set up what they need for a stream in its first calls.
            self._side.wait_stream(self._stream)
            with torch.cuda.stream(self._side):
                run()
            self._stream.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may go on to allocate memory.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
                ):
                    outputs = run()
            except BaseException:
                self._restore()
                raise
        return outputs, graph.replay

    def _restore(self) -> None:
        """Undo what a failed recording leaves: the side stream, and a generator that records."""
        torch.cuda.set_stream(self._stream)
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


def recorder_for(device: torch.device) -> Recorder | None:
    """What records on a device, or None where launches are not worth recording."""
    return CudaRecorder(device) if device.type == "cuda" else None


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

    Attributes:
        outputs: in the memory of the recording. A call gives copies of them.
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
        self.outputs, self._replay = recorder.record(lambda: function(self._inputs))

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        for own, given in zip(self._inputs, inputs, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given, non_blocking=True)
        self._replay()
        # The next replay, of any recording, may write to the same memory.
        return [x.clone() for x in self.outputs]


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
        made, may_record = self._made.get(key), self._may_record(key)
        if made is None:
            if self.reason or len(self._made) >= MOST_RECORDINGS or not may_record:
                return None
            try:
                with _no_kept_casts():
                    made = self._record(lambda x: function(tree_unflatten(x, structure)), leaves)
            except Exception as error:
                self.refuse(one_line(error))
                return None
            self._made[key] = made
        return made(leaves)

    def _may_record(self, key: Any) -> bool:
        """Whether a kind that comes now gets a recording, if it has none."""
        return True

    def _record(
        self, function: Callable[[list[Any]], list[torch.Tensor]], leaves: list[Any]
    ) -> Recording:
        """Record a function, and compare the logits of a replay with its own.

        Where they are equal, so must integers be that follow from them, such as tokens.

        Raises:
            Exception: it cannot be recorded; the message says why.
        """
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise TypeError(f"an input of the forward is a {type(leaf).__name__}")
        own = function(leaves)
        made = Recording(self._recorder, function, leaves)
        again = made(leaves)
        fault = compare(again[:1], own[:1], self._tolerance).fault
        if fault is not None:
            raise ValueError(f"logits of a replay differ from the forward's own {fault}")
        same = not torch.equal(again[0], own[0]) or all(
            torch.equal(x, y) for x, y in zip(again, own, strict=True) if x.dtype == torch.int64
        )
        if not same:
            raise ValueError("a replay made other tokens of logits that are equal")
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


class EpilogueGraphs(Recordings):
    """Forwards with an epilogue, which hand out no logits.

    A kind is recorded when it comes twice in a row, because others may not come again. If one
    cannot be, the forwards alone are replayed as before.
    """

    _last: Any = None

    def _may_record(self, key: Any) -> bool:
        again: bool = key == self._last
        self._last = key
        return again

    def _record(
        self, function: Callable[[list[Any]], list[torch.Tensor]], leaves: list[Any]
    ) -> Recording:
        made = super()._record(function, leaves)
        del made.outputs[0]  # so that other recordings may compute in their memory
        return made


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


@dataclass
class Replayed:
    """What a replayed forward gives, under the names of a model's output.

    Attributes:
        logits: [B, keep, V]; None where there is an epilogue's.
        hidden_states: [B, n, H] each, those that the runner asks for, by number.
        epilogue: what it made of the logits, if the graph has it.
    """

    logits: torch.Tensor | None
    hidden_states: dict[int, torch.Tensor]
    epilogue: torch.Tensor | None = None
    replayed: ClassVar[bool] = True


class RecordedCache(Cache):
    """In the place of the cache while a forward is recorded, with the cursor of the recording.

    What changes in every round and is no tensor would stay as it was then, so it is refused.
    """

    def __init__(self, starts: torch.Tensor, visible: int, layers: list[SpecLayer]) -> None:
        super().__init__(layers=list(layers))
        self.spec_layers = layers
        self.cursor = Cursor()
        self.cursor.starts, self.cursor.visible = starts, visible

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError("the model reads the cache's length, which changes in each round")


class CudaGraphs(LentGraphs):
    """The recorded forwards of a model, over buffers that one call at a time borrows.

    Args:
        recorder: of the model's device.
        tolerance: largest distance of logits that rounding explains.

    Attributes:
        checked: for which calls, of several sequences and with trees, logits were compared.
        complete: whether forwards of all widths are recorded over the buffers, for calls that make
            positions and masks in the recordings (True) and for those with trees (False).
        with_epilogue: the forwards that go on with their logits.
    """

    def __init__(self, recorder: Recorder, tolerance: float) -> None:
        super().__init__(recorder, tolerance)
        self.complete = set[bool]()
        self.checked = set[tuple[bool, bool]]()
        self.with_epilogue = EpilogueGraphs(recorder, tolerance)
        self._batch_size = self._capacity = 0

    def __len__(self) -> int:
        return super().__len__() + len(self.with_epilogue)

    def clear(self) -> None:
        super().clear()
        self.complete.clear()
        self.with_epilogue.clear()

    def lend(
        self,
        runner: SpecRunner,
        borrower: Borrower,
        weights: tuple[int, ...],
        initialize: Callable[[list[SpecLayer], int], None],
    ) -> str:
        """Give a runner's cache the buffers until its call ends, or say why it cannot have them.

        Args:
            runner: of the call, whose cache gets the buffers.
            borrower: the call.
            weights: addresses of all that graphs read beside their inputs.
            initialize: makes the buffers of layers that have none, for a number of sequences.
        """
        if reason := self.refusal(runner):
            return reason
        last: SpecRunner | None = self.user
        if last is not None and last is not runner:
            for layer in last.cache.spec_layers:
                layer.drop()  # its call has ended, and another one writes there now
        cache = runner.cache
        if self.fit(runner, weights):
            for layer, held in zip(cache.spec_layers, self._buffers, strict=True):
                if held is not None:
                    layer.move_to(*held)
            cache.grow(self._capacity)
        else:
            self.keep(())  # before others are made
            self._capacity = 0
            cache.grow(_slots_of(runner))
            initialize(cache.spec_layers, len(cache.lengths))
            self._keep_those_of(cache)
        self.begin(runner, borrower, weights)
        return ""

    def fit(self, runner: SpecRunner, weights: tuple[int, ...]) -> bool:
        """Whether the buffers suffice a cache, and graphs read the weights where they are now."""
        return (
            weights == self._weights
            and len(runner.lengths) == self._batch_size
            and _slots_of(runner) <= self._capacity
        )

    def _keep_those_of(self, cache: SpecCache) -> None:
        """Record over the buffers of a cache."""
        self.keep([x.buffers if x.is_initialized else None for x in cache.spec_layers])
        self._batch_size, self._capacity = len(cache.lengths), cache.cursor.capacity

    def user_of(self, cache: SpecCache) -> SpecRunner | None:
        """The runner of a cache whose forwards are replayed, or None where they are not."""
        runner: SpecRunner | None = self.user
        if self.reason or runner is None or runner.cache is not cache or not self._recorder.here():
            return None
        self._keep_those_of(cache)  # it may have grown
        return runner

    def run(
        self, forward: Callable[..., Any], cache: SpecCache, inputs: dict[str, Any]
    ) -> Replayed | None:
        """Replay a forward, which is recorded first if it is the first of its kind.

        Args:
            forward: takes a cache and the inputs, by name.
            cache: tells where the forward writes.
            inputs: of the model's forward, without the cache.

        Returns:
            None where ``forward`` itself must run: it is a prompt's, or the cache is that of a call
            without the buffers, or the forward cannot be recorded.
        """
        runner = self.user_of(cache)
        if runner is None or is_long(inputs["input_ids"].shape[1]):
            return None
        visible, wanted = cache.cursor.visible, runner.tap.layers

        given = {**inputs, "starts": cache.cursor.starts}
        made, epilogue = given.pop(DEFERRED, None), given.pop(EPILOGUE, None)

        def run(given: dict[str, Any]) -> list[torch.Tensor]:
            starts = given.pop("starts")
            more = {} if made is None else made(starts)
            output = forward(RecordedCache(starts, visible, cache.spec_layers), **given, **more)
            states = output.hidden_states or ()
            chosen = states if wanted is None else [states[n] for n in sorted(wanted)]
            return [output.logits, *chosen]

        outputs = None
        if epilogue is not None:
            outputs = self._replay_on(run, given, epilogue, visible, wanted)
        gives_logits = outputs is None
        if outputs is None:
            outputs = self.replay(run, given, visible, wanted)
        if outputs is None:
            return None
        first, *states = outputs
        numbers = range(len(states)) if wanted is None else sorted(wanted)
        hidden = dict(zip(numbers, states, strict=True))
        return Replayed(first, hidden) if gives_logits else Replayed(None, hidden, first)

    def _replay_on(
        self,
        run: Callable[[dict[str, Any]], list[torch.Tensor]],
        given: dict[str, Any],
        epilogue: Epilogue,
        *more: Any,
    ) -> list[torch.Tensor] | None:
        """Replay a forward and its epilogue, which is the first output; the logits are none."""

        def run_on(given: dict[str, Any]) -> list[torch.Tensor]:
            starts, inputs = given["starts"], given.pop(EPILOGUE)
            logits, *states = run(given)
            return [logits, epilogue.make(logits, starts, inputs), *states]

        both, key = {**given, EPILOGUE: epilogue.inputs}, (epilogue.function, *epilogue.rows)
        return self.with_epilogue.replay(run_on, both, *key, *more)


@dataclass(eq=False)
class Epilogue:
    """What the caller of a forward makes of its logits, in the same CUDA graph where it can be.

    Attributes:
        function: gives a tensor from logits [B, keep, V], the position [B] of the first token that
            each sequence was fed, and inputs by name. It reads nothing else that changes.
        inputs: tensors and plain values, also in nested dicts.
        rows: how many rows of logits are kept, and how many of padding follow them.
        replayed: whether the graph had it.
    """

    function: Callable[..., torch.Tensor]
    inputs: dict[str, Any]
    rows: tuple[int, int]
    replayed: bool = False

    def make(
        self, logits: torch.Tensor, starts: torch.Tensor, inputs: dict[str, Any]
    ) -> torch.Tensor:
        """What it makes of all logits of a forward."""
        return self.function(last_rows(logits, *self.rows), starts, **inputs)

    def of(self, output: Any, starts: torch.Tensor) -> torch.Tensor:
        """What the graph made, or else what it makes now, of a forward's output."""
        made: torch.Tensor | None = getattr(output, "epilogue", None)
        self.replayed = made is not None
        return self.make(output.logits, starts, self.inputs) if made is None else made


def completed(inputs: dict[str, Any], starts: torch.Tensor) -> dict[str, Any]:
    """Inputs of a forward alone, of which some may be a function of its first slots [B]."""
    inputs.pop(EPILOGUE, None)
    made = inputs.pop(DEFERRED, None)
    return inputs if made is None else {**inputs, **made(starts)}


def _slots_of(runner: SpecRunner) -> int:
    """Slots of buffers for a cache; one stays unseen, see `SpecCache.move_cursor`."""
    return 1 + ForwardPolicy(few_slots=True).visible(runner.cache.cursor.capacity)
