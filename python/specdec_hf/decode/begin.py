"""How a call begins: from its arguments to the `Session` of its first round."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.choose import choose_cache
from specdec_hf.cache.fit import coarse_arithmetic
from specdec_hf.cache.fixed_width import check_fixed_width, fix_width
from specdec_hf.cache.handover import import_cache
from specdec_hf.cache.hidden_states import keep_hidden_states
from specdec_hf.cache.plain import Prompt
from specdec_hf.cache.protocol import Lengths, RollbackCache, context_length, vocab_size_of
from specdec_hf.cache.spec_cache import SpecCache
from specdec_hf.compiled.call import use_compiled
from specdec_hf.decode.check_options import check_options
from specdec_hf.decode.choose_drafter import choose_drafter
from specdec_hf.decode.draft_length import DraftLengthPolicy, begin_schedule
from specdec_hf.decode.history import CommittedTokens
from specdec_hf.decode.prefill import prefill
from specdec_hf.decode.rules import resolve_rule
from specdec_hf.decode.session import DEFAULT_NUM_ASSISTANT_TOKENS, Options, Session
from specdec_hf.decode.statistics import SequenceStats, SpecStats
from specdec_hf.decode.token_outputs import TokenOutputs
from specdec_hf.drafters.context import DraftContext, reads_draft
from specdec_hf.drafters.drafter import Drafter, rules_of
from specdec_hf.drafters.lease import Lease
from specdec_hf.drafters.resolve import parts_of, resolve_drafter
from specdec_hf.hf_arguments.call import Call
from specdec_hf.hf_arguments.sampling import sequence_seeds
from specdec_hf.schedules.base import Schedule, ScheduleContext
from specdec_hf.schedules.costs import SHARE_ON_DEVICE, Costs, ExpectedCosts
from specdec_hf.schedules.registry import make_schedule
from specdec_kernels import LOSSLESS_RULES, LOSSLESS_TREE_RULES

SLOTS_AHEAD = 512  # cache slots allocated beyond the prompt before the cache has to grow


def begin(model: Any, call: Call, options: Options) -> Session:
    """Set up the cache, the drafter and the schedules of one call.

    Raises:
        TypeError: a drafter or seed of a wrong type.
        ValueError: prompt longer than the context, drafter that does not fit, bad option.
        RuntimeError: a drafter that another call is using.
    """
    plan = _plan(model, call, options)
    cache, first_logits, notes = _make_cache(plan)
    stats = _statistics(plan, cache, notes)
    lease = Lease(parts_of(plan.drafter))
    try:
        _choose_forwards(plan, cache, stats, lease)
        context = _start_drafter(plan, cache, stats, lease)
    except BaseException:
        lease.release()  # at once, since the traceback keeps it alive
        raise
    length_policy = DraftLengthPolicy(
        plan.schedule, plan.costs, options.guard, plan.drafter, model=model, rule=plan.rule,
        budget=int(plan.budgets.max()), stats=stats, clock=options.clock,
    )  # fmt: skip
    if context is not None and plan.schedule.reads_token_stats:
        context.goes_on = length_policy.goes_on
    if context is not None and plan.schedule.sizes_trees:
        context.nodes = plan.schedule.nodes
    return Session(
        model=model,
        call=call,
        rule=plan.rule,
        cache=cache,
        drafter=plan.drafter,
        context=context,
        length_policy=length_policy,
        history=committed_prompts(call, plan.lengths, plan.max_length),
        prompt_lengths=plan.lengths.copy(),
        budgets=plan.budgets,
        logprobs=[[] for _ in plan.lengths],
        seeds=plan.seed_tensor(),
        lease=lease,
        stats=stats,
        clock=options.clock,
        started=plan.started,
        outputs=_token_outputs(call, cache),
        first_logits=first_logits,
        trace=options.trace,
    )


@dataclass
class _Plan:
    """What is known of a call before anything runs.

    Attributes:
        started: when the call began, by the clock of the options.
        lengths: [B], tokens of each prompt.
        budgets: [B], most new tokens of each sequence.
        schedule: started.
        costs: those that the schedule reads.
        draft_size: most drafted tokens of a sequence in one round.
        seeds: of each sequence.
        notes: on the choice of the drafter.
    """

    model: Any
    call: Call
    options: Options
    drafter: Drafter | None
    rule: str
    started: float
    lengths: Lengths
    budgets: NDArray[np.int64]
    schedule: Schedule
    costs: Costs
    draft_size: int
    seeds: list[int]
    notes: list[str]

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are verified as trees."""
        return self.drafter is not None and self.drafter.size > 0

    @property
    def max_length(self) -> int:
        """No sequence will hold more tokens."""
        return int((self.lengths + self.budgets).max())

    def seed_tensor(self) -> torch.Tensor:
        """[B] int64 on the target's device."""
        return torch.tensor(self.seeds, dtype=torch.int64, device=self.model.device)


def _plan(model: Any, call: Call, options: Options) -> _Plan:
    started = options.clock()
    given = options
    options, notes = choose_drafter(model, call, options)
    drafter = resolve_drafter(options.drafter, options.tree, model)
    check_options(call, options, drafter)
    rule = resolve_rule(options.rule, call.do_sample, rules_of(drafter))
    lengths, budgets = token_budgets(model, call)
    costs = costs_of(model, given, rule, lengths)
    if drafter is not None:
        notes += rounding_notes(model, options, rule, costs)
    schedule, draft_size = _begin_schedule(model, call, options, drafter, costs)
    seeds = sequence_seeds(
        options.seed,
        len(call.mask),
        do_sample=call.do_sample,
        num_return_sequences=call.num_return_sequences,
    )
    return _Plan(
        model, call, options, drafter, rule, started, lengths, budgets, schedule, costs, draft_size,
        seeds, notes,
    )  # fmt: skip


def costs_of(model: Any, options: Options, rule: str, lengths: Lengths) -> Costs:
    """The costs that decide how much a call drafts.

    In arithmetic coarser than float32 the text depends on how much is drafted, so there a clock
    decides only for callers who ask for it. Where the rule reads the draft distribution the guard
    never waits by itself, and its notes may come from a clock.

    Args:
        options: those of the caller, with the defaults that he left.
        lengths: [B], tokens of each prompt.
    """
    schedule = make_schedule(options.num_assistant_tokens_schedule or "constant")
    asked_for = options.guard or schedule.reads_clock
    exact = coarse_arithmetic(model) is None or options.fixed_width is not None
    if exact or asked_for or reads_draft(rule):
        return Costs()
    share = 1.0 if model.device.type == "cpu" else SHARE_ON_DEVICE
    return ExpectedCosts(len(lengths), share, int(lengths.max()))


def rounding_notes(
    model: Any, options: Options, rule: str, costs: Costs, *, beams: bool = False
) -> list[str]:
    """A note where drafts may change the text, because wider forwards round otherwise."""
    dtype = coarse_arithmetic(model)
    if dtype is None or options.fixed_width is not None or reads_draft(rule):
        return []
    timing = ", and depend on timing" if costs.measured else ""
    remedy = "" if beams else "; fixed_width prevents it"
    return [
        f"in {dtype} a forward of several tokens rounds unlike one of one token, so near ties may "
        f"fall otherwise than in plain decoding{timing}{remedy}"
    ]


def _begin_schedule(
    model: Any,
    call: Call,
    options: Options,
    drafter: Drafter | None,
    costs: Costs,
) -> tuple[Schedule, int]:
    """The schedule, started, and the most drafted tokens of a sequence in one round."""
    drafts_tree = drafter is not None and drafter.size > 0
    if drafter is not None and drafter.size:
        length, size = drafter.depth, drafter.size
    else:
        number = options.num_assistant_tokens
        length = size = DEFAULT_NUM_ASSISTANT_TOKENS if number is None else number
    schedule = begin_schedule(
        options.num_assistant_tokens_schedule or "constant",
        drafter,
        ScheduleContext(len(call.mask), length, vocab_size_of(model), drafts_tree, costs),
    )
    return schedule, size if drafts_tree else max(size, schedule.max_draft)


def _make_cache(plan: _Plan) -> tuple[RollbackCache, torch.Tensor | None, list[str]]:
    """The cache, the logits of the model's own prefill if it made one, and notes."""
    model, call, options = plan.model, plan.call, plan.options
    drafts_tree = plan.drafts_trees
    kind = "spec" if drafts_tree else options.cache
    longest = int(plan.lengths.max())
    capacity = min(plan.max_length, longest + SLOTS_AHEAD) + plan.draft_size + 1
    needs: dict[str, Any] = {
        "drafts": plan.drafter is not None,
        "tree": drafts_tree,
        "self_check": options.self_check,
    }
    if call.prefill is not None:
        return prefill(model, call, capacity, kind, **needs)
    prompt = Prompt(call.prompt_ids, call.mask)
    needs["encoded"] = call.encoded
    if call.past is None:
        batch_size = len(plan.lengths)
        cache, notes = choose_cache(model, batch_size, capacity, kind, prompt=prompt, **needs)
    else:
        cache, notes = import_cache(model, call.past, prompt, capacity, kind, **needs)
    return cache, None, notes


def _statistics(plan: _Plan, cache: RollbackCache, notes: list[str]) -> SpecStats:
    options, drafter, rule = plan.options, plan.drafter, plan.rule
    tree = "" if options.tree is None else str(options.tree)
    if not tree and drafter is not None and drafter.size:
        tree = f"that of {drafter.name}"
    return SpecStats(
        sequences=[SequenceStats(prompt_tokens=int(n)) for n in plan.lengths],
        rule=rule,
        lossless=rule in LOSSLESS_RULES or rule in LOSSLESS_TREE_RULES,
        drafter="none" if drafter is None else drafter.name,
        cache=cache.kind,
        tree=tree,
        seeds=plan.seeds,
        notes=[*plan.call.notes, *plan.notes, *notes],
    )


def _choose_forwards(plan: _Plan, cache: RollbackCache, stats: SpecStats, lease: Lease) -> None:
    """Give the forwards their width, and let them run compiled, as the options say."""
    model, options = plan.model, plan.options
    if options.fixed_width is not None:
        fix_width(model, cache, options.fixed_width)
    if options.compile:
        stats.compiled = use_compiled(
            model,
            cache,
            tree=plan.drafts_trees,
            check=options.self_check,
            note=stats.note,
            borrower=lease,
        )
        if stats.compiled.eager:
            stats.note(f"{type(model).__name__} runs eagerly: {stats.compiled.eager}")
    if isinstance(cache, SpecCache) and cache.widths is not None:
        plan.costs.padded = cache.widths.of
    if options.fixed_width is not None and options.self_check:
        check_fixed_width(model, cast(SpecCache, cache))


def _start_drafter(
    plan: _Plan, cache: RollbackCache, stats: SpecStats, lease: Lease
) -> DraftContext | None:
    """What the drafter was started with; None without a drafter."""
    call, drafter = plan.call, plan.drafter
    if drafter is None:
        return None
    context = DraftContext(
        plan.model,
        plan.rule,
        **copy.deepcopy(call.sampling.to_dict()),
        seeds=plan.seed_tensor(),
        batch_size=len(plan.lengths),
        max_length=plan.max_length,
        max_draft=max(plan.draft_size, 16),
        note=stats.note_round,
        self_check=plan.options.self_check,
        compile=plan.options.compile,
        compiled=None if stats.compiled is None else stats.compiled.drafts,
        lease=weakref.ref(lease),  # the drafter keeps the context after the call
        encoder=call.encoder,
        cache=cache,
        kept_states=[],
    )
    tokenizer = call.assistant.target_tokenizer
    for part in parts_of(drafter) if tokenizer is not None else ():
        part.check_tokenizer(tokenizer)
    drafter.start(context)
    return context


def committed_prompts(call: Call, lengths: Lengths, max_length: int) -> CommittedTokens:
    """The prompts without padding, with room for ``max_length`` tokens each."""
    tokens = np.zeros((len(lengths), max_length), dtype=np.int64)
    for b, ids in enumerate(call.prompt_ids):
        tokens[b, : lengths[b]] = ids[call.mask[b]]
    return CommittedTokens(tokens, lengths, np.ones(len(lengths), dtype=bool))


def token_budgets(model: Any, call: Call) -> tuple[Lengths, Lengths]:
    """[B] prompt lengths, and [B] the most new tokens of each sequence."""
    lengths = call.mask.sum(axis=1).astype(np.int64)
    budgets = np.full(len(lengths), call.max_new_tokens, dtype=np.int64)
    context = context_length(model)
    if context is None:
        return lengths, budgets
    if lengths.max() >= context:
        raise ValueError(
            f"prompt of sequence {int(lengths.argmax())} has {int(lengths.max())} tokens, "
            f"but the model's context is {context}"
        )
    return lengths, np.minimum(budgets, context - lengths)


def _token_outputs(call: Call, cache: RollbackCache) -> TokenOutputs | None:
    if not call.outputs:
        return None
    if "hidden_states" in call.outputs and call.prefill is None:
        keep_hidden_states(cache)
    return TokenOutputs(call.outputs, len(call.mask))
