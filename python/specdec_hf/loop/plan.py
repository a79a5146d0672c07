"""The plan of a call: everything that is decided before anything of it runs.

Each choice that drafter "auto" tries is planned whole, and the first plan that is not refused is
carried out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import Refused
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.drafting.checks import describe
from specdec_hf.drafting.drafter import Drafter, drafts_trees, lossy_rules_of, rules_of
from specdec_hf.loop.draft_choice import (
    DraftChoice,
    asked_choice,
    choices,
    lossy_notes,
    resolve_rule,
    rule_of_drafts,
    with_rule_of_ablation,
)
from specdec_hf.loop.draft_length import (
    Pace,
    costs_of,
    draft_length,
    schedule_for,
    timing_notes,
)
from specdec_hf.options import Options, rule_parameters
from specdec_hf.request.call import Call
from specdec_hf.request.sampling import sequence_seeds
from specdec_hf.rules import CUSTOM_RULE, LOSSY_RULES, is_lossy
from specdec_hf.runner.choose import ChosenCache, choose_cache, has_exact_text
from specdec_hf.runner.forwards import Packing, compiles_on, pack_for
from specdec_hf.runner.protocol import CacheRequest, Lengths, Prompt, context_length, vocab_size_of


@dataclass(frozen=True, eq=False)
class Plan:
    """What is known of a call before anything runs.

    Attributes:
        choice: what drafts, as a drafter; its rule may be "auto".
        rule: its name, that of `CUSTOM_RULE` for a function of the caller.
        started: when the call, or the batch that it joins, began by the clock of the options.
        budgets: [B], most new tokens of each sequence.
        seeds: of each sequence.
        pace: what decides how much is drafted.
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
    pace: Pace
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
        """The arguments of the ops that belong to the rule, which takes none where it is greedy."""
        return rule_parameters(self.options) if self.rule in LOSSY_RULES else {}

    @property
    def rule_of_drafts(self) -> str:
        """The rule that the drafter drafts for."""
        if self.rule != CUSTOM_RULE:
            return self.rule
        return rule_of_drafts(rules_of(self.drafter), trees=self.drafts_trees)

    @property
    def lossless(self) -> bool:
        """Whether the text is sure to be as the target alone would write it."""
        drafts = self.drafter is not None or self.rule == CUSTOM_RULE
        return not (drafts and (is_lossy(self.rule) or self.options.ablate is not None))

    @property
    def draft_size(self) -> int:
        """Most drafted tokens of a sequence in one round."""
        if self.drafter is not None and self.drafts_trees:
            return self.drafter.size
        length = draft_length(self.drafter, self.choice.num_assistant_tokens)
        return max(length, self.pace.schedule.max_draft)

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
    *tried, last = choices(model, call, asked)
    reason = ""
    for choose in tried:
        try:
            return planner.plan(choose(reason))
        except (Refused, ImportError) as error:
            # The native module of the suffix automaton may not be built.
            if isinstance(error, ImportError) and sys.modules.get("specdec_host") is not None:
                raise
            reason = str(error)
    return planner.plan(last(reason))


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
        self.joins = joins
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
        cache = options.cache if self.joins is None else self.joins.request.kind
        if trees and choice.named:
            cache = "spec"  # also one that could not be measured
        choice = replace(choice, drafter=drafter)
        if trees and options.ablate is not None:
            raise Refused(
                f"ablate={options.ablate!r} is for chains, got trees of {describe(drafter)}"
            )
        rule = resolve_rule(
            choice.rule, call.samples, rules_of(drafter), lossy_rules_of(drafter),
            trees=None if drafter is None else trees,
        )  # fmt: skip
        remarks = [] if drafter is None else lossy_notes(options, rule)
        length = draft_length(drafter, choice.num_assistant_tokens)
        schedule = schedule_for(drafter, choice.num_assistant_tokens_schedule, length)
        _check_options(model, call, options, choice)
        drafts = drafter is not None or bool(call.assistant.predictions)
        request = CacheRequest(
            len(call.mask), cache, drafts=drafts, tree=trees,
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
        pace = Pace.start(schedule, costs, len(lengths), length, vocab_size_of(model), trees=trees)
        if drafter is not None and not exact:
            remarks += timing_notes(model, rule, costs)
        return Plan(
            model, call, options, choice, rule, self.started, self.budgets, self.seeds, pace,
            request, chosen, self.packing, [*choice.notes, *remarks],
        )  # fmt: skip


def _check_options(model: Any, call: Call, options: Options, choice: DraftChoice) -> None:
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
    if not trees:
        return
    if choice.num_assistant_tokens is not None:
        raise Refused(
            "num_assistant_tokens must not be given with a drafter of trees, which says what is "
            f"drafted, got {choice.num_assistant_tokens}"
        )
    if options.cache not in ("auto", "spec"):
        raise Refused(f"cache must be 'auto' or 'spec' with tree, got {options.cache!r}")


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
