"""Forwards over the buffers of a `SpecCache` as CUDA graphs, and the buffers that graphs belong to.

A graph writes to the addresses that it was recorded with, so buffers outlive the calls: each call
borrows them for its cache. A graph is recorded at the first forward of its kind and compared there
with the forward itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from specdec_hf.cache.spec_cache import SpecCache
from specdec_hf.cache.spec_layer import Cursor, SpecLayer
from specdec_hf.cache.spec_runner import SpecRunner
from specdec_hf.cache.widths import Widths, is_long
from specdec_hf.compiled.recorder import Recorder
from specdec_hf.compiled.recordings import Borrower, LentGraphs


@dataclass
class Replayed:
    """What a replayed forward gives, under the names of a model's output.

    Attributes:
        logits: [B, keep, V].
        hidden_states: [B, n, H] each, those that the runner asks for, by number.
    """

    logits: torch.Tensor
    hidden_states: dict[int, torch.Tensor]
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
        complete: whether forwards of all widths are recorded over the buffers.
    """

    def __init__(self, recorder: Recorder, tolerance: float) -> None:
        super().__init__(recorder, tolerance)
        self.complete = False
        self.checked = set[tuple[bool, bool]]()
        self._batch_size = self._capacity = 0

    def clear(self) -> None:
        super().clear()
        self.complete = False

    def lend(
        self,
        runner: SpecRunner,
        borrower: Borrower,
        weights: tuple[int, ...],
        initialize: Callable[[list[SpecLayer], int], None],
    ) -> str:
        """Give a runner's cache the buffers until its call ends, or say why it cannot have them.

        Args:
            runner: its ``widths`` are those of the call.
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
        runner: SpecRunner | None = self.user
        if self.reason or runner is None or runner.cache is not cache or not self._recorder.here():
            return None
        if is_long(inputs["input_ids"].shape[1]):
            return None
        self._keep_those_of(cache)  # it may have grown
        visible, wanted = cache.cursor.visible, runner.tap.layers

        def run(given: dict[str, Any]) -> list[torch.Tensor]:
            recorded = RecordedCache(given.pop("starts"), visible, cache.spec_layers)
            output = forward(past_key_values=recorded, **given)
            states = output.hidden_states or ()
            chosen = states if wanted is None else [states[n] for n in sorted(wanted)]
            return [output.logits, *chosen]

        given = {**inputs, "starts": cache.cursor.starts}
        outputs = self.replay(run, given, visible, wanted)
        if outputs is None:
            return None
        logits, *states = outputs
        numbers = range(len(states)) if wanted is None else sorted(wanted)
        return Replayed(logits, dict(zip(numbers, states, strict=True)))


def _slots_of(runner: SpecRunner) -> int:
    """Slots of buffers for a cache; one stays unseen, see `SpecCache.move_cursor`."""
    widths = runner.policy.widths or Widths(few_slots=True)
    return 1 + widths.visible(runner.cache.cursor.capacity)
