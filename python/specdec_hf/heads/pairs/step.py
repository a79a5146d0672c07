"""The part of a head that runs at each draft step, and its compiled form.

A graph takes weights, buffers, widths and the number of slots as inputs, so all heads of the same
sizes share the graphs of a process. A head needs two for one sequence and two for a batch: for one
pair and for several.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import pad

from specdec_hf.heads.pairs.cache import HeadCache
from specdec_hf.heads.pairs.head import PairHead
from specdec_hf.runner.comparison import compare, tolerance_of
from specdec_hf.runner.compiled import forward
from specdec_hf.runner.compiled.compiled_call import CompiledCall, run_eagerly, run_without_graphs
from specdec_hf.runner.compiled.cuda_graphs import LentGraphs, recorder_for
from specdec_hf.runner.compiled.forward import WarmUps, compile_settings
from specdec_hf.runner.compiled.layers import LayerForward, LayerGraphs
from specdec_hf.runner.forwards import Borrower, CompileStats
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.packed.linear import LinearWithPackedCopy, bytes_of, unpacked_reason
from specdec_hf.runner.packed.twin import PackedStats, check_packable, resident_bytes
from specdec_hf.runner.policy import is_long, padded, width_of
from specdec_hf.runner.self_check import one_line
from specdec_hf.runner.twin import copied
from specdec_kernels import kv_append_


class PairStep(nn.Module):
    """A forward of a `PairHead` over the keys and values of earlier pairs.

    All its products are those of linear layers, also that with the output matrix, so that all of
    them can be packed. It shares the head's weights.

    Args:
        head: in the dtype and on the device that it drafts in.
    """

    def __init__(self, head: PairHead) -> None:
        super().__init__()
        self.fc, self.midlayer, self.norm = head.fc, head.midlayer, head.norm
        rows, size = head.lm_head.shape
        self.output = nn.Linear(size, rows, bias=False, device="meta")
        self.output.weight = nn.Parameter(head.lm_head, requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """The head's."""
        dtype: torch.dtype = self.output.weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """The head's."""
        device: torch.device = self.output.weight.device
        return device

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`states` of n pairs, and their logits [B, n, draft_vocab_size]."""
        hidden = self.states(**inputs)
        return hidden, self.logits(hidden)

    def states(
        self,
        *,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        places: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        mask: torch.Tensor | None,
        visible: int | None = None,
    ) -> torch.Tensor:
        """The hidden states [B, n, H] of n pairs, whose keys and values are written.

        Args:
            embeddings: [B, n, H] of their tokens.
            hidden: [B, n, H].
            places: [B, n] int64, for the rotary embedding.
            cosines, sines: [P, D], those of place p in row p.
            keys, values: buffers [B, K, S, D], changed in place.
            starts: [B] int64, slot of the first pair.
            mask: [B, n, visible] bool, which slots each pair sees; None lets several pairs see
                those up to their own, and a single one all.
            visible: slots that the pairs see; only given without a mask.
        """
        rotary = cosines[places][:, None], sines[places][:, None]
        q, k, v, residual = self.midlayer.project(embeddings, hidden, rotary)
        kv_append_([keys, values], [k, v], starts)
        slots = visible if mask is None else mask.shape[2]
        attended = attend(q, keys[:, :, :slots], values[:, :, :slots], mask)
        out: torch.Tensor = self.midlayer.finish(residual, attended)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., draft_vocab_size] from hidden states [..., H]."""
        logits: torch.Tensor = self.output(self.norm(hidden))
        return logits


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention [B, H, n, D] of queries whose heads share keys [B, K, S, D]."""
    attention = functional.scaled_dot_product_attention
    out: torch.Tensor
    if mask is None and q.shape[2] > 1:
        out = attention(q, keys, values, is_causal=True, enable_gqa=True)
        return out
    # The queries that share a key are fed as more places of one head, so that it is read once.
    share = q.shape[1] // keys.shape[1]
    together = q.unflatten(1, (-1, share)).flatten(2, 3)
    if mask is not None:
        mask = mask[:, None].repeat(1, 1, share, 1)
    out = attention(together, keys, values, attn_mask=mask).unflatten(2, (share, -1))
    return out.flatten(1, 2)


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


PAIRS = (1, 5)  # of a sequence: each has a graph
SLOTS = 12  # that the compared pairs see
_graphs_of: Counter[LayerForward] = Counter()


def takes(pairs: int, slots: int) -> bool:
    """Whether a step of so many pairs of each sequence runs compiled."""
    return not is_long(pairs) and slots > 1


class CompiledStep:
    """A `PairStep` on packed weights whose forward is compiled.

    Args:
        head: whose weights no longer change.

    Attributes:
        packed: the step on packed weights, without a graph.
        eager: what drafts where graphs do not: ``packed``, or the step on the head's own weights
            where logits of ``packed`` were found to be wrong.
        warm_ups: those of the calls so far.
        cuda_graphs: replays steps on a CUDA device; None on others.
    """

    def __init__(self, head: PairHead) -> None:
        self.packed: Any = copied(PairStep(head), self._replace)
        self.eager = self.packed
        self.warm_ups = WarmUps()
        recorder = recorder_for(self.packed.device)
        self.cuda_graphs: StepGraphs | None = None
        if recorder is not None:
            self.cuda_graphs = StepGraphs(recorder, tolerance_of(self.packed))
        self._checked = set[int]()
        self._compared = False
        self._lock = threading.RLock()

    def _replace(self, module: Any) -> LinearWithPackedCopy | None:
        return LinearWithPackedCopy(module) if unpacked_reason(module) is None else None

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
                reasons = [_difference(self, own, batch_size, seed, cache) for seed in range(2)]
            except Exception as error:
                reasons = [one_line(error)]
            if reason := next(filter(None, reasons), ""):
                graphs.refuse(reason)
        self._checked.add(batch_size)

    def compare(self, head: PairHead) -> str | None:
        """Compare logits of `packed` with the head's own; gives the reason of a first failure."""
        with self._lock, torch.inference_mode():
            if self._compared:
                return None
            self._compared = True
            own = PairStep(head)
            if (reason := _difference(self.packed, own, 1)) is None:
                return None
            self.eager = own
            return f"on packed weights {reason}"

    def _difference(self, head: PairHead, batch_size: int, check: bool) -> str | None:
        own = PairStep(head)
        if check and (reason := _difference(self.packed, own, batch_size)):
            self.eager = own
            return f"on packed weights {reason}"
        if check:
            return _difference(self, own, batch_size)
        for pairs in PAIRS:
            self(**_inputs(own, batch_size, pairs))
        return None


def _difference(
    step: Any, own: PairStep, batch_size: int, seed: int = 0, cache: HeadCache | None = None
) -> str | None:
    """How logits of a step differ from those of the head's own, or None.

    Args:
        step: what is compared.
        own: the head's own step.
        batch_size: number of sequences.
        seed: of the inputs.
        cache: gives the step its buffers.
    """
    tolerance = tolerance_of(own)
    for pairs in PAIRS:
        inputs = _inputs(own, batch_size, pairs, seed)
        if cache is not None:
            for name, kept in zip(("keys", "values"), cache.buffers(0), strict=True):
                inputs[name] = kept.zero_()
                kept[:, :, : 2 * SLOTS] = _inputs(own, batch_size, pairs, seed)[name]
        _, got = step(**inputs)
        _, want = own(**_inputs(own, batch_size, pairs, seed))
        if fault := compare([got], [want], tolerance).fault:
            return f"its logits differ from the head's own {fault}"
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


def packed_step(
    head: PairHead, *, check: bool, note: Callable[[str], None]
) -> tuple[Any, PackedStats]:
    """The step of a head on packed weights, or on its own where that is not possible.

    Args:
        head: on a CPU, whose weights no longer change.
        check: whether the first use of a head compares logits with its own.
        note: told why the head drafts on its own weights.
    """
    started, known = time.perf_counter(), record_of(head).compiled is not None
    try:
        if not known:
            check_packable(PairStep(head))
    except ValueError as error:
        note(f"the head drafts on unpacked weights: {error}")
        return PairStep(head), PackedStats(reason=str(error))
    made = _made_for(head)
    if check and (reason := made.compare(head)) is not None:
        note(f"the head drafts on unpacked weights: {reason}")
    layers = [m for m in made.packed.modules() if isinstance(m, LinearWithPackedCopy)]
    return made.eager, PackedStats(
        layers=len(layers),
        bytes=bytes_of(layers),
        resident_bytes=resident_bytes(),
        seconds=0.0 if known else time.perf_counter() - started,
        reason="" if made.eager is made.packed else "its logits on packed weights differ",
    )


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


def _inputs(step: PairStep, batch_size: int, pairs: int, seed: int = 0) -> dict[str, Any]:
    """Inputs of `PairStep.states` for pairs after a few others, the same for the same seed."""
    layer, device, slots = step.midlayer, step.device, SLOTS - seed
    generator = torch.Generator("cpu").manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, step.dtype)

    starts = torch.arange(batch_size, device=device) + slots - pairs - batch_size
    places = starts[:, None] + torch.arange(pairs, device=device)
    kept = (batch_size, layer.projected[1] // layer.head_dim, 2 * SLOTS, layer.head_dim)
    inputs: dict[str, Any] = {
        "embeddings": noise(batch_size, pairs, step.output.in_features),
        "hidden": noise(batch_size, pairs, step.output.in_features),
        "places": places,
        "starts": starts,
        "mask": torch.arange(slots, device=device) <= places[:, :, None],
    }
    # These are made outside of inference mode in calls too, which a graph is sensitive to.
    with torch.inference_mode(False):
        angles = torch.linspace(0, 1, 64 * layer.head_dim, device=device).view(64, -1)
        inputs["cosines"] = angles.cos().to(step.dtype)
        inputs["sines"] = angles.sin().to(step.dtype)
        inputs["keys"], inputs["values"] = noise(*kept), noise(*kept)
    return inputs
