"""The compiled steps of heads on packed weights, which CUDA devices replay as graphs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from specdec_hf.extras.compiled import forward
from specdec_hf.extras.compiled.compiled_call import CompiledCall, run_eagerly, run_without_graphs
from specdec_hf.extras.compiled.cuda_graphs import LentGraphs, recorder_for
from specdec_hf.extras.compiled.forward import WarmUps, compile_settings
from specdec_hf.extras.compiled.layers import LayerForward, LayerGraphs
from specdec_hf.heads.eagle_family.cache import HeadCache
from specdec_hf.heads.eagle_family.head import PairHead
from specdec_hf.heads.eagle_family.step import PAIRS, PackedStep, PairStep, difference_of, inputs_of
from specdec_hf.runner.comparison import tolerance_of
from specdec_hf.runner.forwards import Borrower, CompileStats, padded, width_of
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.self_check import one_line

# Inputs of a step with a row for each pair.
ROWS = ("embeddings", "hidden", "places", "mask")


class ReplayedStep(tuple[torch.Tensor, torch.Tensor]):
    """Hidden states and logits of a step that was replayed."""

    replayed = True


class StepGraphs(LentGraphs):
    """The recorded steps of a head, over the buffers of a `HeadCache` that one call borrows.

    A step sees all slots of the buffers but the last one, and has one of `BUCKETS` pairs.
    """

    _cache: HeadCache | None = None

    def refuse(self, reason: str) -> None:
        super().refuse(reason)
        self._cache = None

    def lend(
        self, cache: HeadCache, user: Any, borrower: Borrower, weights: tuple[int, ...]
    ) -> HeadCache | str:
        """The buffers for a call, or why it runs without graphs.

        Args:
            cache: empty, of the call; it is kept if no other fits.
            user: has the buffers until the call ends.
            borrower: the call.
            weights: addresses of the head's.
        """
        if reason := self.refusal(user):
            return reason
        if self._cache is None or not self._cache.suffices(cache):
            self._cache = cache
        self._cache.clear()
        self.keep([self._cache.buffers(0)])
        self.begin(user, borrower, weights)
        return self._cache

    def run(self, step: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Replay a step, which is recorded first if it is the first of its kind.

        Args:
            step: gives hidden states and logits from inputs by name.
            inputs: as of `PairStep.states`, with a mask.

        Returns:
            Hidden states [B, n, H] and logits [B, n, V], or None where ``step`` itself must run:
            the inputs are not those of the call that has the buffers, or nothing is recorded.
        """
        keys, values = inputs["keys"], inputs["values"]
        if self._cache is None or self._cache.buffers(0)[0] is not keys:
            return None
        if self.reason or not self._recorder.here():
            return None
        self.keep([(keys, values)])  # they may have grown
        size = inputs["places"].shape[1]
        width = width_of(size)
        hidden = keys.shape[2] - 1 - inputs["mask"].shape[2]
        given = {**inputs, "mask": pad(inputs["mask"], (0, hidden))}
        given |= {name: padded(given[name], width) for name in ROWS}
        # Turns are gathered here, so that their tables may move.
        given |= {
            name: inputs[name][given["places"]].flatten(0, 1) for name in ("cosines", "sines")
        }
        places = torch.arange(given["places"].numel(), device=keys.device)
        given["places"] = places.view_as(given["places"])
        del given["keys"], given["values"]

        def run(given: dict[str, Any]) -> list[torch.Tensor]:
            states, logits = step(**given, keys=keys, values=values)
            return [logits, states]

        outputs = self.replay(run, given)
        if outputs is None:
            return None
        logits, states = outputs
        return ReplayedStep((states[:, :size], logits[:, :size]))


_graphs_of: Counter[LayerForward] = Counter()


class CompiledStep(PackedStep):
    """A step on packed weights whose forward is compiled.

    Attributes:
        warm_ups: those of the calls so far.
        cuda_graphs: replays steps on a CUDA device; None on others.
    """

    def __init__(self, head: PairHead) -> None:
        super().__init__(head, rounded=False, fused=False)
        self.warm_ups = WarmUps()
        recorder = recorder_for(self.packed.device)
        self.cuda_graphs: StepGraphs | None = None
        if recorder is not None:
            self.cuda_graphs = StepGraphs(recorder, tolerance_of(self.packed))
        self._checked = set[int]()

    @functools.cached_property
    def _run(self) -> LayerForward:
        # Importing the compiler takes half a second, and steps on a CPU have no graph.
        return _step_graphs(self.packed.dtype, forward.BACKEND).of(self.packed)

    @property
    def graphs(self) -> int:
        """How many were made, by heads of the same sizes."""
        return _graphs_of[self._run]

    def __call__(self, **inputs: Any) -> Any:
        """As `PairStep.forward`."""
        output = None
        if self.cuda_graphs is not None:
            output = self.cuda_graphs.run(self._forward, inputs)
        return self._forward(**inputs) if output is None else output

    def _forward(self, **inputs: Any) -> Any:
        before = forward.graphs_made()
        try:
            return self._run(self.packed, **inputs)
        finally:
            _graphs_of[self._run] += forward.graphs_made() - before

    def warm_up(self, head: PairHead, *, several: bool, check: bool) -> str | None:
        """Make the graphs for one sequence or for several, and compare them with the head's own.

        Args:
            head: that this step was made for.
            several: whether the call has several sequences.
            check: whether logits are compared.

        Returns:
            Why this step does not serve such a call, or None. A reason is kept, so that what failed
            is not compiled again in each call.
        """
        difference = functools.partial(self._difference, head, 1 + several, check)
        return self.warm_ups.run(several, check, difference, self._lock)

    def lend(self, cache: HeadCache, user: Any, borrower: Borrower) -> HeadCache | str:
        """As `StepGraphs.lend`."""
        assert self.cuda_graphs is not None
        weights = tuple(x.data_ptr() for x in self.packed.parameters())
        with self._lock:
            return self.cuda_graphs.lend(cache, user, borrower, weights)

    def check_replays(self, head: PairHead, batch_size: int) -> None:
        """Compare logits of replayed steps with the head's own, with new inputs in each replay."""
        graphs, own, call = self.cuda_graphs, PairStep(head), Borrower()
        if graphs is None or graphs.reason or batch_size in self._checked:
            return
        with self._lock, compile_settings(), torch.inference_mode():
            cache = self.lend(HeadCache(head.config, batch_size, head.lm_head, 24), call, call)
            if isinstance(cache, str):
                return  # another call has the buffers, so that this one runs without graphs
            try:
                reasons = [difference_of(self, own, batch_size, seed, cache) for seed in range(2)]
            except Exception as error:
                reasons = [one_line(error)]
            if reason := next(filter(None, reasons), ""):
                graphs.refuse(reason)
        self._checked.add(batch_size)

    def _difference(self, head: PairHead, batch_size: int, check: bool) -> str | None:
        own = PairStep(head)
        if check and (reason := difference_of(self.packed, own, batch_size)):
            self.eager = own
            return f"on packed weights {reason}"
        if check:
            return difference_of(self, own, batch_size)
        for pairs in PAIRS:
            self(**inputs_of(own, batch_size, pairs))
        return None


def compiled_step(
    head: PairHead, *, several: bool, check: bool, note: Callable[[str], None]
) -> CompiledCall:
    """The compiled step of a head for one call; ``stats.eager`` says why it has no graph.

    Args:
        head: whose weights no longer change.
        several: whether the call has several sequences.
        check: whether the first use of a head compares logits with its own.
        note: told why the call has no graph from a failure on.
    """
    made = _made_for(head)
    before = made.warm_ups.seconds
    reason = made.warm_up(head, several=several, check=check)
    stats = CompileStats(made.graphs, made.warm_ups.seconds - before)
    if reason is not None:
        run_eagerly(made.eager, stats, reason)
    return CompiledCall(made.eager, made, stats, note)


def borrow_graphs(
    call: CompiledCall,
    head: PairHead,
    cache: HeadCache,
    user: Any,
    borrower: Borrower | None,
    *,
    check: bool,
) -> HeadCache:
    """The cache for the steps of a call, which are replayed as CUDA graphs where they can be.

    Args:
        call: of the head.
        head: that drafts.
        cache: empty; it is that of the call where no graphs are.
        user: drafts until the call ends.
        borrower: the call.
        check: whether the first use of a head compares logits of replayed steps with its own.
    """
    step = call.forward
    assert isinstance(step, CompiledStep)
    if step.cuda_graphs is None:
        return cache
    lent: HeadCache | str = "nothing says when the call ends"
    if borrower is not None:
        if check:
            step.check_replays(head, cache.batch_size)
        lent = step.lend(cache, user, borrower)
    if isinstance(lent, str):
        run_without_graphs(step.packed, call.stats, lent, call.note)
        return cache
    call.stats.cuda_graphs = len(step.cuda_graphs)
    return lent


def _made_for(head: PairHead) -> CompiledStep:
    record = record_of(head)
    if record.compiled is None:
        with torch.inference_mode(False), torch.no_grad():
            record.compiled = CompiledStep(head)
    made: CompiledStep = record.compiled
    return made


@functools.cache
def _step_graphs(dtype: torch.dtype, backend: str) -> LayerGraphs:
    return LayerGraphs(dtype, backend)
