"""The compiled forward of one call, and what the call reports of it.

When a call begins, the forward is warmed up, and its CUDA graphs are checked, recorded and lent to
the call's runner.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from specdec_hf.extras.compiled.cuda_graphs import completed
from specdec_hf.extras.compiled.forward import (
    CompiledForward,
    compile_settings,
    compiled_forward,
    difference_in,
)
from specdec_hf.runner.forwards import BUCKETS, FIRST, Borrower, CompileStats, ForwardPolicy
from specdec_hf.runner.protocol import CACHE_NAME, Runner
from specdec_hf.runner.self_check import PASSING, CheckPlan, one_line, undisturbed
from specdec_hf.runner.spec_runner import SpecRunner


def borrow_graphs(
    forward: CompiledForward,
    model: Any,
    runner: SpecRunner,
    borrower: Borrower | None,
    *,
    tree: bool,
    check: bool,
) -> str:
    """Let a call's runner have the CUDA graphs and their buffers, or say why it runs without.

    The first call of a kind compares logits of replayed forwards with the model's own, and a call
    that needs other buffers records forwards of all widths.

    Args:
        forward: of the model, warmed up.
        model: that of the runner.
        runner: of the call.
        borrower: the call.
        tree: whether trees will be fed.
        check: whether logits are compared.
    """
    graphs = forward.cuda_graphs
    if graphs is None:
        return ""
    if borrower is None:
        return "nothing says when the call ends"
    if graphs.reason:
        return graphs.reason
    reason, started = "", time.perf_counter()
    try:
        reason = _warm_up(forward, model, runner, tree, check)
    except Exception as error:
        graphs.refuse(one_line(error))
    finally:
        forward.warm_ups.seconds += time.perf_counter() - started
    return reason or graphs.reason or forward.lend(runner, borrower)


def _warm_up(
    forward: CompiledForward, model: Any, runner: SpecRunner, tree: bool, check: bool
) -> str:
    graphs, size = forward.cuda_graphs, len(runner.lengths)
    capacity = runner.cache.cursor.capacity
    assert graphs is not None
    key = (size > 1, tree)
    if (key in graphs.checked or not check) and forward.has_graphs_for(runner):
        return ""
    with undisturbed(model), compile_settings(), torch.inference_mode():
        # A recording is made in the first plan. The second shows whether it reads new inputs.
        for number in range(2 if check and key not in graphs.checked else 0):
            plan = CheckPlan(model, 1 + key[0], key[0], tree, number)
            slots = max(capacity, plan.capacity + BUCKETS[-1])
            made, call = _runner_for(forward, model, len(plan.prompts), slots, tree)
            if reason := forward.lend(made, call):
                return reason
            if difference := difference_in(made, model, plan, check):
                graphs.refuse(difference)
            call.held = False
            if graphs.reason:
                return graphs.reason
        if check:
            graphs.checked.add(key)
        if not forward.has_graphs_for(runner):
            made, call = _runner_for(forward, model, size, capacity, tree)
            if reason := forward.lend(made, call):
                return reason
            for width in BUCKETS:
                tokens = torch.zeros(size, width, dtype=torch.int64, device=model.device)
                made.forward(tokens, made.lengths * 0, width)
            call.held = False
            graphs.complete.add(not tree)
    return ""


def _runner_for(
    forward: CompiledForward, model: Any, batch_size: int, capacity: int, tree: bool
) -> tuple[SpecRunner, Borrower]:
    policy = ForwardPolicy(compiled=forward, few_slots=True, defers=not tree, one_by_one=False)
    return SpecRunner(model, batch_size, capacity, policy), Borrower()


class Replays(Protocol):
    """What replays forwards as CUDA graphs."""

    @property
    def reason(self) -> str:
        """Why it records none any more, or ""."""
        ...

    def __len__(self) -> int:
        """The number of CUDA graphs."""
        ...


class Compiled(Protocol):
    """What runs in a model's place, with the model's arguments."""

    @property
    def graphs(self) -> int:
        """The number of graphs that torch.compile made."""
        ...

    @property
    def cuda_graphs(self) -> Replays | None:
        """The forwards that are replayed; None where the device has none."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's forward."""
        ...


class CompiledCall:
    """A compiled forward in one call: it counts graphs, and runs the model where it fails.

    Args:
        model: what runs after a failure.
        forward: in its place.
        stats: of the call.
        note: told of a failure.
    """

    def __init__(
        self, model: Any, forward: Compiled, stats: CompileStats, note: Callable[[str], None]
    ) -> None:
        self.model, self.forward, self.stats, self.note = model, forward, stats, note

    def __call__(self, **inputs: Any) -> Any:
        if not self.stats.eager:
            before = self.forward.graphs
            try:
                output = self.forward(**inputs)
                self.count(getattr(output, "replayed", False))
                return output
            except PASSING:
                raise
            except Exception as error:
                run_eagerly(self.model, self.stats, f"a compiled forward raised {one_line(error)}")
                self.note(f"{type(self.model).__name__} runs eagerly: {self.stats.eager}")
            finally:
                self.stats.graphs = self.forward.graphs
                self.stats.recompilations += self.forward.graphs - before
        return self.model(**completed(inputs, inputs[CACHE_NAME].cursor.starts))

    def count(self, replayed: bool) -> None:
        """Count a forward, or several in one graph, and say where graphs are given up."""
        graphs = self.forward.cuda_graphs
        if graphs is None:
            return
        self.stats.cuda_graphs = len(graphs)
        self.stats.replayed += replayed
        if graphs.reason and not self.stats.without_cuda_graphs:
            run_without_graphs(self.model, self.stats, graphs.reason, self.note)


def use_compiled(
    model: Any,
    runner: Runner,
    *,
    tree: bool,
    check: bool,
    note: Callable[[str], None],
    borrower: Borrower | None,
) -> CompileStats:
    """Let the forwards of a runner run compiled, or warn why they run eagerly.

    Args:
        model: that of the runner.
        runner: its cache is empty, or filled by a prefill.
        tree: whether trees will be fed.
        check: whether the first use of a model compares logits with the model's own.
        note: told of a forward that fails later in the call.
        borrower: the call, to which CUDA graphs and their buffers are lent until it ends; None
            runs without.
    """
    stats = CompileStats()
    if not isinstance(runner, SpecRunner):
        run_eagerly(model, stats, f"compiled forwards need cache='spec', got {runner.kind!r}")
        return stats
    try:
        forward = compiled_forward(model)
    except ValueError as error:
        run_eagerly(model, stats, str(error))
        return stats
    before = forward.warm_ups.seconds
    reason = forward.warm_up(model, padded=len(runner.lengths) > 1, tree=tree, check=check)
    if reason is None:
        runner.policy = replace(
            runner.policy,
            few_slots=forward.cuda_graphs is not None,
            defers=forward.cuda_graphs is not None and not tree,
            omits_mask=runner.policy.omits_mask & {FIRST},
            compiled=CompiledCall(model, forward, stats, note),
        )
        without = borrow_graphs(forward, model, runner, borrower, tree=tree, check=check)
        stats.cuda_graphs = len(forward.cuda_graphs or ())
        if without:
            run_without_graphs(model, stats, without, note)
    else:
        run_eagerly(model, stats, reason)
    stats.graphs, stats.seconds = forward.graphs, forward.warm_ups.seconds - before
    return stats


def run_eagerly(model: Any, stats: CompileStats, reason: str) -> None:
    """Say why the forwards of a call run without graphs."""
    stats.eager = reason
    warnings.warn(f"{type(model).__name__} runs eagerly: {reason}", stacklevel=2)


def run_without_graphs(
    model: Any, stats: CompileStats, reason: str, note: Callable[[str], None]
) -> None:
    """Say why the forwards of a call on a CUDA device replay no CUDA graphs."""
    stats.without_cuda_graphs = reason
    note(f"{type(model).__name__} runs without CUDA graphs: {reason}")
