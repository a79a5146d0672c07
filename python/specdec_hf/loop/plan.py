"""The plan of a call: everything that is decided before anything of it runs.

Where no drafter is named, "auto", a tree of everything that the library can draft for the model
comes first. Where the call or the model refuses trees, the suffix automaton drafts chains, and
where it refuses drafts, plain decoding answers. So "auto" raises only where plain decoding does
too. Each candidate is planned whole, and the first plan that is not refused is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import Refused, did_you_mean, shown
from specdec_hf.drafters.copying import SuffixAutomatonDrafter
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.drafting.checks import describe
from specdec_hf.drafting.drafter import Drafter, drafts_trees, lossy_rules_of, rules_of
from specdec_hf.drafting.registry import AUTO
from specdec_hf.heads.auto import AutoDrafter
from specdec_hf.loop.draft_length import begin_schedule, check_schedule
from specdec_hf.loop.own_rule import check_takes, name_of, rule_of_drafts
from specdec_hf.options import DEFAULT_NUM_ASSISTANT_TOKENS, Options, rule_name, rule_parameters
from specdec_hf.request.call import Call
from specdec_hf.request.sampling import sequence_seeds
from specdec_hf.rules import CUSTOM_RULE, LOSSY_RULES, is_lossy, text_depends_on_drafts
from specdec_hf.runner.choose import ChosenCache, check_kind, choose_cache
from specdec_hf.runner.comparison import coarse_arithmetic
from specdec_hf.runner.forwards import compiles_on, pack_for
from specdec_hf.runner.packed.twin import PackedStats, PackedTwin
from specdec_hf.runner.protocol import CacheRequest, Lengths, Prompt, context_length, vocab_size_of
from specdec_hf.schedules.base import Schedule, ScheduleContext
from specdec_hf.schedules.costs import SHARE_ON_DEVICE, Costs, ExpectedCosts
from specdec_hf.schedules.registry import make_schedule

Packing = tuple[PackedTwin | None, PackedStats | None]


@dataclass
class Plan:
    """What is known of a call before anything runs.

    Attributes:
        options: those of the call with the drafter chosen; rule and cache may be "auto".
        rule: its name, that of `CUSTOM_RULE` for a function of the caller.
        rule_parameters: those of the ops that belong to the rule.
        lossless: whether the text is sure to be as the target alone would write it.
        started: when the call began, by the clock of the options.
        lengths: [B], tokens of each prompt.
        budgets: [B], most new tokens of each sequence.
        seeds: of each sequence.
        schedule: started.
        costs: those that the schedule reads.
        draft_size: most drafted tokens of a sequence in one round.
        request: what is asked of the cache.
        chosen: the kind of the cache; None where the model's own prefill decides it.
        packing: the packed twin of the model, and what was packed; see `pack_for`.
        notes: on these choices.
    """

    model: Any
    call: Call
    options: Options
    drafter: Drafter | None
    rule: str
    rule_parameters: dict[str, Any]
    lossless: bool
    started: float
    lengths: Lengths
    budgets: NDArray[np.int64]
    seeds: list[int]
    schedule: Schedule
    costs: Costs
    draft_size: int
    request: CacheRequest
    chosen: ChosenCache | None
    packing: Packing
    notes: list[str]

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are verified as trees."""
        return drafts_trees(self.drafter)

    @property
    def rule_of_drafts(self) -> str:
        """The rule that the drafter drafts for."""
        if self.rule != CUSTOM_RULE:
            return self.rule
        return rule_of_drafts(rules_of(self.drafter), trees=self.drafts_trees)

    @property
    def max_length(self) -> int:
        """No sequence will hold more tokens."""
        return int((self.lengths + self.budgets).max())

    def seed_tensor(self) -> torch.Tensor:
        """[B] int64 on the target's device."""
        return torch.tensor(self.seeds, dtype=torch.int64, device=self.model.device)


def make_plan(model: Any, call: Call, options: Options, packing: Packing | None = None) -> Plan:
    """The plan of a call without beams.

    The choice of the drafter depends on the call, the model and the options, never on a clock.

    Args:
        model: the target.
        call, options: not changed.
        packing: of the model in a call that runs; None packs what has changed.

    Raises:
        TypeError: a drafter or seed of a wrong type.
        ValueError: prompt longer than the context, drafter that does not fit, bad option.
    """
    options = _with_rule_of_ablation(call, options)
    planner = _Planner(model, call, options, packing)
    if options.drafter != AUTO or options.tree is not None:  # only drafters serve ``tree``
        return planner.plan(options)
    reason = _why_nothing_is_drafted(call, options)
    if reason is None:
        try:
            return planner.plan(
                *_with_usable_head(model, _with_tree(call, options)), cache=options.cache
            )
        except (Refused, ImportError) as error:  # the native module of the suffix automaton
            reason = str(error)
        try:
            chains = _with_chains(call, options)
            drafts = f"drafts chains with {chains.drafter.name}"
            if chains.rule != options.rule:
                drafts += f" and rule {chains.rule!r}"
            return planner.plan(chains, [f"drafter {AUTO!r} {drafts}: {reason}"])
        except (Refused, ImportError) as error:
            reason = str(error)
    return planner.plan(*_without_drafts(options, reason))


def _with_rule_of_ablation(call: Call, options: Options) -> Options:
    """The residual of chains is a part of rule token.

    Raises:
        ValueError: another rule, or a call that draws no recovered token.
    """
    if options.ablate is None:
        return options
    if not call.do_sample:
        raise ValueError(
            f"ablate={options.ablate!r} needs do_sample=True: greedy decoding draws no token"
        )
    if options.rule not in ("auto", "token"):
        raise ValueError(
            f"rule must be 'auto' or 'token' with ablate={options.ablate!r}, "
            f"got {shown(options.rule)}"
        )
    return replace(options, rule="token")


def plain_beams(call: Call, options: Options) -> tuple[Options, list[str]]:
    """The options of a beam search without "auto", and notes."""
    assert call.beams is not None
    if options.drafter != AUTO or options.tree is not None:
        return options, []
    return _without_drafts(options, f"num_beams={call.beams.num_beams} needs a draft model")


def _without_drafts(options: Options, reason: str) -> tuple[Options, list[str]]:
    return replace(options, drafter=None), [f"drafter {AUTO!r} drafts nothing: {reason}"]


def _why_nothing_is_drafted(call: Call, options: Options) -> str | None:
    if options.num_assistant_tokens == 0:
        return "num_assistant_tokens is 0"
    if call.prefill is None:
        return None
    names = ", ".join(call.prefill.names)
    return f"whether drafts fit {names} is known after the prompt only; name a drafter to try"


def _with_tree(call: Call, options: Options) -> Options:
    # Optimal goes by the clock, on which the text of a lossy rule would depend.
    lossy = is_lossy(rule_name(options)) and call.do_sample
    schedule = options.num_assistant_tokens_schedule or ("constant" if lossy else "optimal")
    return replace(options, drafter=AutoDrafter(), num_assistant_tokens_schedule=schedule)


def _with_usable_head(model: Any, options: Options) -> tuple[Options, list[str]]:
    """The same trees of copied text alone, and a note, where the model's head cannot be used."""
    try:
        options.drafter.has_head(model)
    except ValueError as error:
        note = f"drafter {AUTO!r} drafts without the model's head: {error}"
        return replace(options, drafter=AutoDrafter(head=False)), [note]
    return options, []


def _with_chains(call: Call, options: Options) -> Options:
    """Rule match leaves the text to the seed alone, so that the benefit guard may pause drafting.

    Copied tokens are accepted as often under it as under token.
    """
    sampled = rule_name(options) == "auto" and call.do_sample
    return replace(
        options, drafter=SuffixAutomatonDrafter(), rule="match" if sampled else options.rule
    )


class _Planner:
    """What all candidates of a call share, and the plan of each."""

    def __init__(self, model: Any, call: Call, options: Options, packing: Packing | None) -> None:
        self.model, self.call, self.given = model, call, options
        self.started = options.clock()
        self.lengths, self.budgets = token_budgets(model, call)
        self.seeds: list[int] | None = None
        self.packing = packing or pack_for(model, options.compile)
        self.twin, _ = self.packing

    def plan(self, options: Options, notes: Sequence[str] = (), cache: str | None = None) -> Plan:
        """The plan with a drafter.

        Args:
            options: those of the call with the drafter chosen; rule and cache may be "auto".
            notes: on the choice of the drafter.
            cache: the kind that trees are to have, "spec" where it is not given.

        Raises:
            Refused, ImportError: the call or the model does not go with the drafter.
            ValueError: another fault, of an argument.
        """
        model, call, lengths = self.model, self.call, self.lengths
        drafter = resolve_drafter(
            options.drafter, options.tree, model, call.assistant.target_tokenizer
        )
        trees = drafts_trees(drafter)
        if trees and options.ablate is not None:
            raise Refused(
                f"ablate={options.ablate!r} is for chains, got trees of {describe(drafter)}"
            )
        rule = resolve_rule(
            options.rule, call.do_sample, rules_of(drafter), lossy_rules_of(drafter),
            trees=None if drafter is None else trees,
        )  # fmt: skip
        parameters = rule_parameters(options)
        remarks = [] if drafter is None else _lossy_notes(options, rule, parameters)
        lossless = not remarks and rule != CUSTOM_RULE
        asked = options.num_assistant_tokens_schedule
        schedule = make_schedule("constant" if asked is None else asked)
        _check_options(model, call, options, drafter, schedule)
        request = CacheRequest(
            len(call.mask), (cache or "spec") if trees else options.cache,
            drafts=drafter is not None, tree=trees, self_check=options.self_check,
            prompt=Prompt(call.prompt_ids, call.mask), encoded=call.encoded,
        )  # fmt: skip
        chosen = None if call.prefill is not None else choose_cache(model, request, self.twin)
        if drafter is not None and options.num_assistant_tokens == 0:
            remarks.append(
                "nothing is drafted: num_assistant_tokens is 0; drafter=None does without a drafter"
            )
        exact = has_exact_text(model, chosen, self.twin)
        chose_clock = self.given.num_assistant_tokens_schedule is not None and schedule.reads_clock
        by_clock = bool(self.given.guard) or chose_clock
        costs = costs_of(model, rule, lengths, exact=exact, by_clock=by_clock)
        schedule, draft_size = _begun(model, call, options, drafter, schedule, costs)
        if self.seeds is None:
            self.seeds = sequence_seeds(
                options.seed,
                len(call.mask),
                do_sample=call.do_sample,
                num_return_sequences=call.num_return_sequences,
            )
        if drafter is not None and not exact:
            remarks += timing_notes(model, rule, costs)
        return Plan(
            model, call, options, drafter, rule, parameters, lossless, self.started, lengths,
            self.budgets, self.seeds, schedule, costs, draft_size, request, chosen, self.packing,
            [*notes, *remarks],
        )  # fmt: skip


def _lossy_notes(options: Options, rule: str, parameters: dict[str, Any]) -> list[str]:
    """What may make the text of drafts another than the target's own; empty where nothing does."""
    notes = []
    if rule in LOSSY_RULES:
        values = " and ".join(f"{name}={value:g}" for name, value in parameters.items())
        notes.append(
            f"rule {rule!r} with {values} is lossy: the text need not be as the target's own"
        )
    if rule == CUSTOM_RULE:
        notes.append(
            f"{name_of(options.rule)} is a function of the caller's and counts as lossy; "
            "check_rule tells whether it is lossless"
        )
    if options.ablate is not None:
        notes.append(
            f"ablate={options.ablate!r} is lossy: recovered tokens are drawn from P, so that the "
            "text is biased towards the drafter's"
        )
    return notes


def resolve_rule(
    rule: Any,
    do_sample: bool,
    supported: Sequence[str],
    lossy: Sequence[str],
    *,
    trees: bool | None,
) -> str:
    """The acceptance rule of a call.

    Args:
        rule: what the caller asked for. "auto" is greedy without sampling, else the first rule
            that the drafter supports. Without sampling "typical" decides as greedy does, and is
            called so. A function is called `CUSTOM_RULE`.
        do_sample: whether the call samples.
        supported: the lossless rules that the drafter's drafts can be verified with, best first.
        lossy: the others that they can be, which must be asked for.
        trees: whether the drafts are trees; None where nothing is drafted.

    Raises:
        ValueError: another rule, or greedy verification of sampled text, which is not lossless.
    """
    if not isinstance(rule, str):
        if trees is not None:
            check_takes(rule, trees=trees)
            rule_of_drafts(supported, trees=trees)
        return CUSTOM_RULE
    if rule == "auto":
        return supported[0] if do_sample else "greedy"
    choices = (*supported, *lossy)
    if rule not in choices:
        raise Refused(
            f"rule must be 'auto', {', '.join(map(repr, choices))} with this drafter, "
            f"got {rule!r}{did_you_mean(rule, choices)}"
        )
    if rule == "typical" and not do_sample:
        return "greedy"
    if rule == "greedy" and do_sample:
        raise ValueError(
            "rule='greedy' needs do_sample=False: it would not keep the target's distribution"
        )
    return rule


def _check_options(
    model: Any, call: Call, options: Options, drafter: Drafter | None, schedule: Schedule
) -> None:
    """Raises ValueError for options that do not go together, by name."""
    if options.num_assistant_beams is not None:
        raise ValueError(
            f"num_assistant_beams must be None without num_beams, got {options.num_assistant_beams}"
        )
    forwards = drafter is not None and drafter.needs.target_forward
    trees = drafts_trees(drafter)
    if "hidden_states" in call.outputs and forwards:
        raise ValueError(
            "output_hidden_states must be False with a drafter that makes the target's forward "
            f"itself, got {describe(drafter)}"
        )
    if options.compile and forwards and compiles_on(model.device):
        raise ValueError(
            "compile must be None or False with a drafter that makes the target's forward itself, "
            f"got True with {describe(drafter)}"
        )
    check_kind(options.cache)
    if drafter is not None and trees:
        # First, because the command line gives a number of tokens beside a schedule.
        check_schedule(schedule, drafter)
        _check_tree_options(options)


def _check_tree_options(options: Options) -> None:
    if options.num_assistant_tokens is not None:
        raise Refused(
            "num_assistant_tokens must not be given with a drafter of trees, which says what is "
            f"drafted, got {options.num_assistant_tokens}"
        )
    if options.cache not in ("auto", "spec"):
        raise Refused(f"cache must be 'auto' or 'spec' with tree, got {options.cache!r}")


def has_exact_text(model: Any, chosen: ChosenCache | None, twin: PackedTwin | None) -> bool:
    """Whether the text of a call cannot depend on how much is drafted."""
    if coarse_arithmetic(model) is None:
        return True
    if twin is None or chosen is None or chosen.model is not twin.model:
        return False
    if torch.is_autocast_enabled("cpu"):
        return False  # its products are torch's own then
    return twin.invariant and chosen.kind.has_slots


def costs_of(model: Any, rule: str, lengths: Lengths, *, exact: bool, by_clock: bool) -> Costs:
    """The costs that decide how much a call drafts.

    Where the text depends on how much is drafted, a clock decides only for callers who ask for it.
    Where that is so by the rule, the guard never waits by itself, and its notes may come from a
    clock.

    Args:
        model: the target.
        rule: acceptance rule.
        lengths: [B], tokens of each prompt.
        exact: `has_exact_text`.
        by_clock: whether the caller asks for a clock: by a guard, or a schedule that reads one.
    """
    if exact or by_clock or text_depends_on_drafts(rule):
        return Costs()
    share = 1.0 if model.device.type == "cpu" else SHARE_ON_DEVICE
    return ExpectedCosts(len(lengths), share, int(lengths.max()))


def timing_notes(model: Any, rule: str, costs: Costs) -> list[str]:
    """A note where a clock decides how wide forwards are, and wider ones round otherwise.

    That texts of other forwards may differ says nothing of this text: who compares two texts says
    whether they differ, and why, and a call compares none.
    """
    dtype = coarse_arithmetic(model)
    if dtype is None or text_depends_on_drafts(rule) or not costs.measured:
        return []
    return [
        f"in {dtype} a forward of several tokens rounds unlike one of one token, and timing "
        "decides how many are drafted: at near ties the same call may give another text"
    ]


def _begun(
    model: Any,
    call: Call,
    options: Options,
    drafter: Drafter | None,
    schedule: Schedule,
    costs: Costs,
) -> tuple[Schedule, int]:
    """The schedule of the call, started, and the most drafted tokens of a sequence in one round."""
    trees = drafts_trees(drafter)
    if drafter is not None and trees:
        length, size = drafter.depth, drafter.size
    else:
        number = options.num_assistant_tokens
        length = size = DEFAULT_NUM_ASSISTANT_TOKENS if number is None else number
    schedule = begin_schedule(
        schedule,
        drafter,
        ScheduleContext(len(call.mask), length, vocab_size_of(model), trees, costs),
    )
    return schedule, size if trees else max(size, schedule.max_draft)


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
