"""How a call begins: from its arguments to the `Session` of its first round."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from specdec_hf.drafting.call import Asks, DrafterCall, Forwards
from specdec_hf.drafting.checks import begin_state
from specdec_hf.loop.draft_length import DraftLengthPolicy
from specdec_hf.loop.plan import Plan, make_plan
from specdec_hf.loop.session import CommittedTokens, Sequences, Session
from specdec_hf.loop.statistics import SequenceStats, SpecStats
from specdec_hf.options import Options
from specdec_hf.request.call import Call
from specdec_hf.runner.forwards import Borrower, compiles_on, width_of
from specdec_hf.runner.protocol import Lengths, Runner

SLOTS_AHEAD = 512  # slots and tokens allocated beyond the prompt before cache and text have to grow
MIN_MAX_DRAFT = 16  # drafters make buffers of this size, whatever small numbers a call asks for


def begin(
    model: Any, call: Call, options: Options, seed: Any = None, batch: Session | None = None
) -> Session:
    """Set up the runner, the drafter and the schedules of one call.

    Args:
        model: the target.
        call: not changed but for the tensors of its sampling parameters; see `Session.take`.
        options: those of the caller.
        seed: of this call; None is that of the options.
        batch: what the sequences will join, or None. What drafts there, its statistics and its
            packed weights serve them, which may take as long to check for changes as a round takes.

    Raises:
        TypeError: a drafter or seed of a wrong type.
        ValueError: prompt longer than the context, drafter that does not fit, bad option.
    """
    plan = make_plan(model, call, options, seed, None if batch is None else batch.plan)
    runner, first_logits, notes = _make_runner(plan)
    stats = _statistics(plan, runner, notes, None if batch is None else batch.stats)
    borrower = Borrower()
    _choose_forwards(plan, runner, stats, borrower)
    length_policy = DraftLengthPolicy(
        plan.pace, options.guard, plan.drafter, model=model, rule=plan.rule,
        batch_size=len(plan.lengths), stats=stats, clock=options.clock,
        padded=width_of if stats.forwards == "compiled" else None,
    )  # fmt: skip
    drafter_call, state = None, None
    if plan.drafter is not None:
        asks = length_policy.asks()
        drafter_call = _drafter_call(plan, runner, stats, borrower, asks, reports=batch is None)
        state = begin_state(plan.drafter, drafter_call)
        length_policy.begin(state.cost, state.expected_benefit, int(plan.budgets.max()))
    return Session(
        plan=plan,
        runner=runner,
        drafter_call=drafter_call,
        state=state,
        length_policy=length_policy,
        history=committed_prompts(call, plan.lengths, plan.max_length),
        sequences=Sequences(
            calls=[(call, index) for index in range(len(plan.lengths))],
            numbers=list(range(len(plan.lengths))),
            prompt_lengths=plan.lengths.copy(),
            budgets=plan.budgets.copy(),
            logprobs=[[] for _ in plan.lengths],
            seeds=plan.seed_tensor(),
        ),
        sampling=call.sampling,
        borrower=borrower,
        stats=stats,
        outputs=_token_outputs(call, runner),
        first_logits=first_logits,
    )


def _make_runner(plan: Plan) -> tuple[Runner, torch.Tensor | None, list[str]]:
    """The runner, the logits of the model's own prefill if it made one, and notes."""
    call, longest = plan.call, int(plan.lengths.max())
    capacity = min(plan.max_length, longest + SLOTS_AHEAD) + plan.draft_size + 1
    if call.prefill is not None:
        from specdec_hf.extras.own_prefill import own_prefill  # noqa: PLC0415  # rarely asked for

        return own_prefill(plan, capacity)
    assert plan.chosen is not None
    if call.past is None:
        return plan.chosen.make(capacity), None, plan.chosen.notes
    from specdec_hf.extras.handover import import_cache  # noqa: PLC0415  # rarely given

    return import_cache(plan.chosen, call.past, capacity), None, plan.chosen.notes


def _statistics(
    plan: Plan, runner: Runner, notes: list[str], joined: SpecStats | None
) -> SpecStats:
    drafter, layout = plan.drafter, plan.choice.tree
    notes = [*plan.call.notes, *plan.notes, *notes]
    if joined is not None:
        for note in notes:
            joined.note(note)
        return joined
    tree = "" if layout is None else str(layout)
    if not tree and drafter is not None and drafter.size:
        tree = f"that of {drafter.name}"
    return SpecStats(
        sequences=[SequenceStats(prompt_tokens=int(n)) for n in plan.lengths],
        rule=plan.rule,
        lossless=plan.lossless,
        drafter="none" if drafter is None else drafter.name,
        cache=runner.kind,
        tree=tree,
        seeds=plan.seeds,
        notes=notes,
    )


def _choose_forwards(plan: Plan, runner: Runner, stats: SpecStats, borrower: Borrower) -> None:
    """Report how the forwards run, and let them run compiled where the options say so."""
    model, options = plan.model, plan.options
    _, packed = plan.packing
    if packed is not None:
        stats.packed = packed
        if plan.chosen is None:
            packed.refuse("the model's own prefill fills its cache")
        elif plan.chosen.why_not_packed:
            packed.refuse(plan.chosen.why_not_packed)
        packed.report(model, stats.note, asked=options.compile is True)
    if options.compile and compiles_on(model.device):
        from specdec_hf.extras.compiled.compiled_call import (  # noqa: PLC0415  # CUDA alone
            use_compiled,
        )

        stats.compiled = use_compiled(
            model, runner, tree=plan.drafts_trees, check=options.self_check, note=stats.note,
            borrower=borrower,
        )  # fmt: skip
        if stats.compiled.eager:
            stats.note(f"{type(model).__name__} runs eagerly: {stats.compiled.eager}")


def _drafter_call(
    plan: Plan,
    runner: Runner,
    stats: SpecStats,
    borrower: Borrower,
    asks: Asks,
    *,
    reports: bool,
) -> DrafterCall:
    """What the drafter is told of the call.

    It ``reports`` what was packed and compiled for it, unless another one of the batch has.
    """
    call, drafter, tokenizer = plan.call, plan.drafter, plan.call.assistant.target_tokenizer
    assert drafter is not None
    for note in drafter.check_tokenizer(tokenizer):
        stats.note_round(note)
    return DrafterCall(
        plan.model,
        plan.rule_of_drafts,
        sampling=copy.deepcopy(call.sampling),
        seeds=plan.seed_tensor(),
        max_length=plan.max_length,
        max_draft=max(plan.draft_size, MIN_MAX_DRAFT),
        note=stats.note_round,
        forwards=Forwards(
            self_check=plan.options.self_check,
            compile=plan.options.compile,
            compiled=stats.compiled.drafts if reports and stats.compiled is not None else None,
            packed=stats.packed.drafts if reports and stats.packed is not None else None,
            borrower=borrower,
        ),
        encoder=call.encoder,
        runner=runner,
        asks=asks,
        kept_states=[],
    )


def committed_prompts(call: Call, lengths: Lengths, max_length: int) -> CommittedTokens:
    """The prompts without padding, in arrays that grow with the texts up to ``max_length``."""
    columns = min(max_length, int(lengths.max()) + SLOTS_AHEAD)
    tokens = np.zeros((len(lengths), columns), dtype=np.int64)
    for b, ids in enumerate(call.prompt_ids):
        tokens[b, : lengths[b]] = ids[call.mask[b]]
    return CommittedTokens(tokens, lengths, np.ones(len(lengths), dtype=bool))


def _token_outputs(call: Call, runner: Runner) -> Any:
    if not call.output.per_token:
        return None
    if "hidden_states" in call.output.per_token and call.prefill is None:
        runner.tap.open()
    from specdec_hf.extras.token_outputs import TokenOutputs  # noqa: PLC0415  # rarely asked for

    return TokenOutputs(call.output.per_token, len(call.mask))
