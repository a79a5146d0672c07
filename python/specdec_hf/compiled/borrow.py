"""CUDA graphs at the beginning of a call: they are checked, recorded, and lent to its runner."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from specdec_hf.cache.check_plan import CheckPlan
from specdec_hf.cache.own_logits import one_line, undisturbed
from specdec_hf.cache.spec_runner import ForwardPolicy, SpecRunner
from specdec_hf.cache.widths import BUCKETS, Widths
from specdec_hf.compiled.forward import CompiledForward, difference_in
from specdec_hf.compiled.recordings import Borrower
from specdec_hf.compiled.warm_ups import compile_settings


@dataclass(eq=False)
class WarmUpCall:
    """Borrows buffers while nothing of a call runs."""

    held: bool = True


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
    widths = runner.policy.widths
    assert widths is not None
    if widths.fixed is not None:
        return "fixed_width compares forwards that are not replayed"
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
            made, call = _runner_for(forward, model, len(plan.prompts), slots)
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
            made, call = _runner_for(forward, model, size, capacity)
            if reason := forward.lend(made, call):
                return reason
            for width in BUCKETS:
                tokens = torch.zeros(size, width, dtype=torch.int64, device=model.device)
                made.forward(tokens, made.lengths * 0, width)
            call.held, graphs.complete = False, True
    return ""


def _runner_for(
    forward: CompiledForward, model: Any, batch_size: int, capacity: int
) -> tuple[SpecRunner, WarmUpCall]:
    policy = ForwardPolicy(Widths(few_slots=True), compiled=forward, one_by_one=False)
    return SpecRunner(model, batch_size, capacity, policy), WarmUpCall()
