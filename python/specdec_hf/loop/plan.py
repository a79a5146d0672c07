"""The plan of a call: everything that is decided before anything of it runs.

Each choice that drafter "auto" tries is planned whole, and the first plan that is not refused is
carried out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import Refused, did_you_mean
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.drafting.call import reads_draft
from specdec_hf.drafting.checks import describe
from specdec_hf.drafting.drafter import Drafter, drafts_trees, lossy_rules_of, rules_of
from specdec_hf.drafting.registry import AUTO, class_of
from specdec_hf.loop.draft_choice import (
    DraftChoice,
    asked_choice,
    default_chains,
    default_tree,
    nothing,
    why_nothing_is_drafted,
    with_rule_of_ablation,
)
from specdec_hf.options import DEFAULT_NUM_ASSISTANT_TOKENS, Options, rule_parameters
from specdec_hf.request.call import Call
from specdec_hf.request.sampling import sequence_seeds
from specdec_hf.rules import (
    CUSTOM_RULE,
    LOSSY_RULES,
    check_takes,
    name_of,
    text_depends_on_drafts,
)
from specdec_hf.runner.choose import ChosenCache, check_kind, choose_cache
from specdec_hf.runner.comparison import coarse_arithmetic
from specdec_hf.runner.forwards import compiles_on, pack_for
from specdec_hf.runner.packed.model import PackedModel, PackedStats
from specdec_hf.runner.protocol import CacheRequest, Lengths, Prompt, context_length, vocab_size_of
from specdec_hf.schedules.base import ConstantSchedule, Schedule, ScheduleContext
from specdec_hf.schedules.costs import SHARE_ON_DEVICE, Costs, ExpectedCosts
from specdec_hf.schedules.registry import check_takes as check_schedule
from specdec_hf.schedules.registry import make_schedule

Packing = tuple[PackedModel | None, PackedStats | None]


@dataclass(frozen=True, eq=False)
class Plan:
    """What is known of a call before anything runs.

    Attributes:
        choice: what drafts, as a drafter; its rule may be "auto".
        rule: its name, that of `CUSTOM_RULE` for a function of the caller.
        started: when the call, or the batch that it joins, began by the clock of the options.
        budgets: [B], most new tokens of each sequence.
        seeds: of each sequence.
        schedule: started.
        costs: those that the schedule reads.
        request: what is asked of the cache.
        chosen: the kind of the cache; None where the model's own prefill decides it.
        packing: the packed model of the model, and what was packed; see `pack_for`.
        notes: on what was chosen.
    """

    model: Any
    call: Call
    options: Options
    choice: DraftChoice
    rule: str
    started: float
    budgets: NDArray[np.int64]
    seeds: list[int]
    schedule: Schedule
    costs: Costs
    request: CacheRequest
    chosen: ChosenCache | None
    packing: Packing
    notes: list[str]

    @cached_property
    def lengths(self) -> Lengths:
        """[B], tokens of each prompt."""
        lengths: Lengths = self.call.mask.sum(axis=1).astype(np.int64)
        return lengths

    @property
    def drafter(self) -> Drafter | None:
        """What drafts."""
        drafter: Drafter | None = self.choice.drafter
        return drafter

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are verified as trees."""
        return drafts_trees(self.drafter)

    @cached_property
    def rule_parameters(self) -> dict[str, Any]:
        """The arguments of the ops that belong to the rule."""
        return rule_parameters(self.options)

    @property
    def rule_of_drafts(self) -> str:
        """The rule that the drafter drafts for."""
        if self.rule != CUSTOM_RULE:
            return self.rule
        return rule_of_drafts(rules_of(self.drafter), trees=self.drafts_trees)

    @property
    def lossless(self) -> bool:
        """Whether the text is sure to be as the target alone would write it."""
        lossy = self.drafter is not None and bool(_lossy_notes(self.options, self.rule))
        return not lossy and self.rule != CUSTOM_RULE

    @property
    def draft_size(self) -> int:
        """Most drafted tokens of a sequence in one round."""
        if self.drafter is not None and self.drafts_trees:
            return self.drafter.size
        return max(draft_length(self.choice), self.schedule.max_draft)

    @property
    def max_length(self) -> int:
        """No sequence will hold more tokens."""
        return int((self.lengths + self.budgets).max())

    def seed_tensor(self) -> torch.Tensor:
        """[B] int64 on the target's device."""
        return torch.tensor(self.seeds, dtype=torch.int64, device=self.model.device)


def make_plan(
    model: Any, call: Call, options: Options, seed: Any = None, joins: Plan | None = None
) -> Plan:
    """The plan of a call without beams.

    The choice of the drafter depends on the call, the model and the options, never on a clock.

    Args:
        model, call, options, seed: as in `begin`.
        joins: of the batch that the sequences will join, which drafts and is packed so; or None.

    Raises:
        TypeError: a drafter or seed of a wrong type.
        ValueError: prompt longer than the context, drafter that does not fit, bad option.
    """
    if joins is None:
        asked = asked_choice(options, call.assistant)
    else:
        asked = replace(joins.choice, tree=None, notes=())
    asked = with_rule_of_ablation(call, options, asked)
    planner = _Planner(model, call, options, asked, seed, joins)
    if asked.drafter != AUTO or asked.tree is not None:  # only drafters serve ``tree``
        return planner.plan(asked)
    reason = why_nothing_is_drafted(call, asked)
    for name in (AUTO, "suffix_automaton") if reason is None else ():
        class_of(name)  # a module of ours that cannot be imported is no reason to draft otherwise
    for choose in (default_tree, default_chains) if reason is None else ():
        try:
            return planner.plan(choose(model, call, asked, reason))
        except (Refused, ImportError) as error:
            # The native module of the suffix automaton may not be built.
            if isinstance(error, ImportError) and sys.modules.get("specdec_host") is not None:
                raise
            reason = str(error)
    return planner.plan(nothing(asked, reason))


class _Planner:
    """What all choices for a call share, and the plan of each."""

    def __init__(
        self,
        model: Any,
        call: Call,
        options: Options,
        asked: DraftChoice,
        seed: Any,
        joins: Plan | None,
    ) -> None:
        self.model, self.call, self.options, self.asked = model, call, options, asked
        self.seed = options.seed if seed is None else seed
        self.started = options.clock() if joins is None else joins.started
        self.lengths, self.budgets = token_budgets(model, call)
        self.packing = pack_for(model, options.compile) if joins is None else joins.packing
        self.packed, _ = self.packing

    @cached_property
    def seeds(self) -> list[int]:
        """Of each sequence; a call that is refused draws none."""
        call = self.call
        return sequence_seeds(
            self.seed, len(call.mask), do_sample=call.do_sample,
            num_return_sequences=call.output.num_return_sequences,
        )  # fmt: skip

    def plan(self, choice: DraftChoice) -> Plan:
        """The plan with a choice; raises Refused or ImportError where its drafter cannot serve."""
        model, call, options, lengths = self.model, self.call, self.options, self.lengths
        drafter = resolve_drafter(
            choice.drafter, choice.tree, model, call.assistant.target_tokenizer
        )
        trees = drafts_trees(drafter)
        # A tree that is asked for is drafted on a cache that could not be measured, too.
        cache = "spec" if trees and choice is self.asked else options.cache
        choice = replace(choice, drafter=drafter)
        if trees and options.ablate is not None:
            raise Refused(
                f"ablate={options.ablate!r} is for chains, got trees of {describe(drafter)}"
            )
        rule = resolve_rule(
            choice.rule, call.do_sample, rules_of(drafter), lossy_rules_of(drafter),
            trees=None if drafter is None else trees,
        )  # fmt: skip
        remarks = [] if drafter is None else _lossy_notes(options, rule)
        asked = choice.num_assistant_tokens_schedule
        schedule = make_schedule("constant" if asked is None else asked)
        if drafter is None or draft_length(choice) == 0:
            schedule = ConstantSchedule()
        _check_options(model, call, options, choice, schedule)
        request = CacheRequest(
            len(call.mask), cache, drafts=drafter is not None, tree=trees,
            self_check=options.self_check, prompt=Prompt(call.prompt_ids, call.mask),
            encoded=call.encoded,
        )  # fmt: skip
        chosen = None if call.prefill is not None else choose_cache(model, request, self.packed)
        if drafter is not None and choice.num_assistant_tokens == 0:
            remarks.append(
                "nothing is drafted: num_assistant_tokens is 0; drafter=None does without a drafter"
            )
        exact = has_exact_text(model, chosen, self.packed)
        chose_clock = self.asked.num_assistant_tokens_schedule is not None and schedule.reads_clock
        by_clock = bool(options.guard) or chose_clock
        costs = costs_of(model, rule, lengths, exact=exact, by_clock=by_clock)
        schedule.start(
            ScheduleContext(len(lengths), draft_length(choice), vocab_size_of(model), trees, costs)
        )
        if drafter is not None and not exact:
            remarks += timing_notes(model, rule, costs)
        return Plan(
            model, call, options, choice, rule, self.started, self.budgets, self.seeds, schedule,
            costs, request, chosen, self.packing, [*choice.notes, *remarks],
        )  # fmt: skip


def _lossy_notes(options: Options, rule: str) -> list[str]:
    """What may make the text of drafts another than the target's own; empty where nothing does."""
    notes = []
    if rule in LOSSY_RULES:
        parameters = rule_parameters(options).items()
        values = " and ".join(f"{name}={value:g}" for name, value in parameters)
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

    "auto" is greedy without sampling, else the first rule that the drafter supports. Without
    sampling "typical" decides as greedy does, and is called so. A function is called `CUSTOM_RULE`.
    ``trees`` is None where nothing is drafted.

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


def rule_of_drafts(rules: Sequence[str], *, trees: bool) -> str:
    """The rule as for which a drafter with these rules drafts for one of the user's own.

    Raises:
        Refused: the drafts would share noise with the target, or have no distribution that can
            be told to a rule.
    """
    wanted = ["token"]
    if trees:
        wanted = ["multi_draft", "target_only"] if reads_draft(rules[0]) else ["target_only"]
    for rule in wanted:
        if rule in rules:
            return rule
    raise Refused(
        f"rule must be {', '.join(map(repr, ('auto', *rules)))} with this drafter, got a rule of "
        f"your own, which needs drafts as for {' or '.join(map(repr, wanted))}"
    )


def _check_options(
    model: Any, call: Call, options: Options, choice: DraftChoice, schedule: Schedule
) -> None:
    """Raises ValueError for options that do not go together, by name."""
    drafter: Drafter | None = choice.drafter
    if options.num_assistant_beams is not None:
        raise ValueError(
            f"num_assistant_beams must be None without num_beams, got {options.num_assistant_beams}"
        )
    forwards = drafter is not None and drafter.needs.target_forward
    trees = drafts_trees(drafter)
    if "hidden_states" in call.output.per_token and forwards:
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
    if drafter is not None:
        # First, because the command line gives a number of tokens beside a schedule.
        has_stats = drafter.draws or drafter.reports_confidence
        check_schedule(drafter.name, schedule, trees=trees, has_stats=has_stats)
    if not trees:
        return
    if choice.num_assistant_tokens is not None:
        raise Refused(
            "num_assistant_tokens must not be given with a drafter of trees, which says what is "
            f"drafted, got {choice.num_assistant_tokens}"
        )
    if options.cache not in ("auto", "spec"):
        raise Refused(f"cache must be 'auto' or 'spec' with tree, got {options.cache!r}")


def has_exact_text(model: Any, chosen: ChosenCache | None, packed: PackedModel | None) -> bool:
    """Whether the text of a call cannot depend on how much is drafted."""
    if coarse_arithmetic(model) is None:
        return True
    if packed is None or chosen is None or chosen.model is not packed.model:
        return False
    if torch.is_autocast_enabled("cpu"):
        return False  # its products are torch's own then
    return packed.invariant and chosen.kind.has_slots


def costs_of(model: Any, rule: str, lengths: Lengths, *, exact: bool, by_clock: bool) -> Costs:
    """The costs that decide how much a call drafts.

    Where the text depends on how much is drafted, a clock decides only for callers who ask for it.
    Where that is so by the rule, the guard never waits by itself, and its notes may come from a
    clock. ``exact`` is `has_exact_text`, and ``by_clock`` whether the caller asks for a clock.
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


def draft_length(choice: DraftChoice) -> int:
    """How many tokens a round drafts as the caller asks for them, or the depth of the trees."""
    drafter: Drafter | None = choice.drafter
    if drafter is not None and drafter.size:
        return drafter.depth
    number = choice.num_assistant_tokens
    return DEFAULT_NUM_ASSISTANT_TOKENS if number is None else number


def token_budgets(model: Any, call: Call) -> tuple[Lengths, Lengths]:
    """[B] prompt lengths, and [B] the most new tokens of each sequence."""
    lengths = call.mask.sum(axis=1).astype(np.int64)
    budgets = np.full(len(lengths), call.stopping.max_new_tokens, dtype=np.int64)
    context = context_length(model)
    if context is None:
        return lengths, budgets
    if lengths.max() >= context:
        raise ValueError(
            f"prompt of sequence {int(lengths.argmax())} has {int(lengths.max())} tokens, "
            f"but the model's context is {context}"
        )
    return lengths, np.minimum(budgets, context - lengths)
