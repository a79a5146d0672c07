"""A model's forward on a copy of its modules whose layers are compiled.

One `CompiledForward` serves all calls with a model, and is kept as long as the model. Its graphs
are made in a warm-up, together with the self-check: the texts of runner/self_check.py go through
it, and their logits are compared with those of the model itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx.experimental._config as shape_settings
from torch._dynamo.utils import counters

from specdec_hf.extras.compiled.cuda_graphs import (
    CudaGraphs,
    RecordedCache,
    completed,
    recorder_for,
)
from specdec_hf.extras.compiled.layers import (
    LayerBuffers,
    LayerGraphs,
    Place,
    compiled_copy,
    replaced_layer,
)
from specdec_hf.runner.comparison import tolerance_of
from specdec_hf.runner.forwards import BUCKETS, Borrower, ForwardPolicy
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.module_copy import copy_reason, structure_of
from specdec_hf.runner.protocol import CACHE_NAME
from specdec_hf.runner.self_check import (
    DIFFERENT,
    PASSING,
    CheckPlan,
    changing,
    compare_rows,
    logits_alone,
    one_line,
    undisturbed,
)
from specdec_hf.runner.spec_cache import SpecCache, SpecLayer
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_hf.runner.structure import unknown_structure

# Dynamo gives up beyond this number of graphs of one function. A model needs four for each type of
# its layers: for one token and for several, of one sequence and of a batch.
MOST_GRAPHS = 64


@dataclass(frozen=True)
class WarmUp:
    """The outcome of a warm-up.

    Attributes:
        reason: why there are no graphs, or None.
        checked: whether logits were compared.
    """

    reason: str | None
    checked: bool

    def settles(self, check: bool) -> bool:
        """Whether a call, with or without a comparison of logits, needs no other warm-up."""
        return self.reason is not None or self.checked or not check


class WarmUps:
    """Runs the warm-ups of one compiled forward, and keeps their outcomes.

    Attributes:
        seconds: how long they took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._outcomes: dict[Hashable, WarmUp] = {}

    def run(
        self,
        kind: Hashable,
        check: bool,
        difference: Callable[[], str | None],
        *held: AbstractContextManager[Any],
    ) -> str | None:
        """Make the graphs for a kind of call, unless an earlier warm-up settles it.

        Args:
            kind: calls of one kind need the same graphs.
            check: whether ``difference`` compares logits.
            difference: makes the graphs, and returns how logits differ or None.
            held: entered in this order around ``difference``.

        Returns:
            Why the graphs do not serve such a call, or None. A reason is kept, so that what failed
            is not compiled again in each call.

        Raises:
            torch.OutOfMemoryError, MemoryError: no memory; the next call tries again.
        """
        known = self._outcomes.get(kind)
        if known is not None and known.settles(check):
            return known.reason
        started = time.perf_counter()
        try:
            with ExitStack() as stack:
                for context in (*held, compile_settings(), torch.inference_mode()):
                    stack.enter_context(context)
                reason = difference()
        except PASSING:
            raise
        except Exception as error:
            reason = f"torch.compile raised {one_line(error)}"
        finally:
            self.seconds += time.perf_counter() - started
        self._outcomes[kind] = WarmUp(reason, check)
        return reason


@contextmanager
def compile_settings() -> Iterator[None]:
    """Settings of a warm-up, in which each size of a shape is a symbol of its own."""
    limit = torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS)
    with limit, shape_settings.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


BACKEND = "inductor"  # of torch.compile


class CompiledForward:
    """Runs forwards over the buffers of a `SpecCache`, in the place of a model.

    Args:
        model: the causal language model, for which `copy_reason` is None; it is not changed.

    Attributes:
        graphs: how many torch.compile made.
        cuda_graphs: replays forwards on a CUDA device; None on others.
        warm_ups: those of the calls so far.
    """

    def __init__(self, model: Any) -> None:
        self.graphs, self.warm_ups = 0, WarmUps()
        self.made_for = structure_of(model)
        self._place, self._buffers = Place(), list[LayerBuffers]()
        self._graphs = LayerGraphs(model.dtype, BACKEND)
        self._copy = compiled_copy(model, self._replace)
        # Keys and values [1, H, 0, D] of each layer; None for one without a cache of its own.
        self._like: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        recorder = recorder_for(model.device)
        self.cuda_graphs = None if recorder is None else CudaGraphs(recorder, tolerance_of(model))
        self._lock = threading.RLock()  # the place and the buffers are those of one forward

    def _replace(self, number: int, layer: Any) -> Any:
        self._buffers.append(LayerBuffers(self._place))
        return replaced_layer(layer, self._buffers[-1], self._graphs)

    def __call__(self, **inputs: Any) -> Any:
        """As the model's forward, with the inputs that the cache made."""
        cache: SpecCache = inputs.pop(CACHE_NAME)
        with self._lock:
            if self.cuda_graphs is not None:
                output = self.cuda_graphs.run(self._forward, cache, inputs)
                if output is not None:
                    return output
            return self._forward(cache, **completed(inputs, cache.cursor.starts))

    def replay(
        self,
        function: Callable[[Callable[..., Any], dict[str, Any]], list[torch.Tensor]],
        cache: SpecCache,
        inputs: dict[str, Any],
        *more: Any,
    ) -> list[torch.Tensor] | None:
        """Replay a function of several forwards, or None where it cannot be.

        Args:
            function: gives logits and other tensors from a forward, which takes a cache and inputs
                by name, and from ``inputs``.
            cache: that the forwards write to.
            inputs, more: as of `Recordings.replay`.
        """
        with self._lock:
            if self.cuda_graphs is None or self.cuda_graphs.user_of(cache) is None:
                return None
            return self.cuda_graphs.replay(partial(function, self._forward), inputs, *more)

    def _forward(self, cache: SpecCache | RecordedCache, **inputs: Any) -> Any:
        self._point_to(cache, inputs["input_ids"].shape[1])
        before = graphs_made()
        try:
            return self._copy(**{CACHE_NAME: cache}, **inputs)
        finally:
            self.graphs += graphs_made() - before
            for buffers in self._buffers:
                buffers.keys = buffers.values = None  # they belong to the caller

    def _point_to(self, cache: SpecCache | RecordedCache, width: int) -> None:
        """Let the layers write where the cache's cursor points, and read its buffers."""
        cursor, place = cache.cursor, self._place
        slots = cursor.starts[:, None] + torch.arange(width, device=cursor.starts.device)
        # A token before the first slot is padding. The last slot that the forward sees is free in
        # its row, which is shorter than the longest.
        place.slots = torch.where(slots < 0, cursor.visible - 1, slots)
        place.rows = torch.arange(len(slots), device=slots.device)[:, None]
        place.visible = slots.new_empty(cursor.visible)
        self._initialize(cache.spec_layers, len(slots))
        for buffers, layer in zip(self._buffers, cache.spec_layers, strict=False):
            if layer.is_initialized:
                buffers.keys, buffers.values = layer.buffers

    def _initialize(self, layers: list[SpecLayer], batch_size: int) -> None:
        """Make the buffers of an empty cache."""
        for layer, like in zip(layers, self._like, strict=False):
            if like is not None and not layer.is_initialized:
                layer.lazy_initialization(*(x.expand(batch_size, -1, -1, -1) for x in like))

    def warm_up(self, model: Any, *, padded: bool, tree: bool, check: bool) -> str | None:
        """Make all graphs for one sequence, or for a batch, and compare logits with the model's.

        Args:
            model: the model that this forward was made for.
            padded: whether the sequences of the call differ in length, or are several.
            tree: whether trees will be fed.
            check: whether logits are compared.

        Returns:
            Why this forward does not serve such a call, or None. A reason is kept, so that what
            failed is not compiled again in each call.
        """
        if model.training:
            return "it is in training mode"
        difference = partial(self._difference, model, padded, tree, check)
        # In this order: a check of another thread runs forwards while it holds the model.
        held = undisturbed(model), self._lock
        return self.warm_ups.run((padded, tree), check, difference, *held)

    def _difference(self, model: Any, padded: bool, tree: bool, check: bool) -> str | None:
        plan = CheckPlan(model, 1 + padded, padded, tree)
        if plan.too_short:
            return f"the model's context holds {plan.context} tokens"
        if not self._like:
            runner = SpecRunner(model, 1, 8)
            runner.forward(plan.texts[0][None, :1].to(model.device), plan.prompts[:1] * 0, 1)
            self._like = [_without_slots(layer) for layer in runner.cache.spec_layers]
        policy = ForwardPolicy(compiled=self, one_by_one=False)
        runner = SpecRunner(model, len(plan.prompts), plan.capacity + BUCKETS[-1], policy)
        return difference_in(runner, model, plan, check)

    def lend(self, runner: SpecRunner, borrower: Borrower) -> str:
        """As `CudaGraphs.lend`."""
        assert self.cuda_graphs is not None
        with self._lock:
            return self.cuda_graphs.lend(runner, borrower, self._weights(), self._initialize)

    def has_graphs_for(self, runner: SpecRunner) -> bool:
        """Whether CUDA graphs of all widths exist for buffers that suffice a runner's cache."""
        graphs = self.cuda_graphs
        if graphs is None or runner.policy.defers not in graphs.complete:
            return False
        return graphs.fit(runner, self._weights())

    def _weights(self) -> tuple[int, ...]:
        return tuple(x.data_ptr() for x in (*self._copy.parameters(), *self._copy.buffers()))


def compiled_forward(model: Any) -> CompiledForward:
    """The compiled forward of a model, made at the first call and again where the model changed.

    Raises:
        ValueError: a model of which no copy can be made; the message says why.
    """
    with changing:  # hooks and attributes are the caller's
        reason = unknown_structure(model) or copy_reason(model)
        if reason is not None:
            raise ValueError(reason)
        record = record_of(model)
        made: CompiledForward | None = record.compiled
        if made is None or made.made_for != structure_of(model):
            made = record.compiled = CompiledForward(model)
    return made


def difference_in(runner: SpecRunner, model: Any, plan: CheckPlan, check: bool) -> str | None:
    """How logits of a plan's texts, fed through an empty cache, differ from the model's own.

    Args:
        runner: its forwards run compiled.
        model: that of the runner.
        plan: what is fed.
        check: whether logits are compared.
    """
    rows = plan.run(runner)
    if not check:
        return None
    own = [logits_alone(model, text) for text in plan.texts]
    fault = compare_rows(model, rows, own).fault
    return None if fault is None else f"{DIFFERENT} {fault}"


def graphs_made() -> int:
    """How many graphs torch.compile has made in this process."""
    made: int = counters["stats"]["unique_graphs"]
    return made


def _without_slots(layer: SpecLayer) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not layer.is_initialized:
        return None
    keys, values = layer.buffers
    return keys[:, :, :0].clone(), values[:, :, :0].clone()
