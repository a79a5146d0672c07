"""What may draft in a call: what the caller asks for, and what drafter "auto" tries.

Where no drafter is named, "auto", a tree of everything that the library can draft for the model
comes first. Where the call or the model refuses trees, the suffix automaton drafts chains, and
where it refuses drafts, plain decoding answers. So "auto" raises only where plain decoding does
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec_hf import plugins
from specdec_hf.arguments import Refused, check_integer, did_you_mean, shown
from specdec_hf.drafting.call import reads_draft
from specdec_hf.drafting.registry import AUTO, class_of
from specdec_hf.options import (
    COMMON,
    Options,
    resolve_num_assistant_tokens,
    rule_name,
    rule_parameters,
)
from specdec_hf.request.call import Assistant, Call
from specdec_hf.request.inputs import is_language_model
from specdec_hf.rules import (
    CUSTOM_RULE,
    GREEDY_WITHOUT_SAMPLING,
    LOSSY_RULES,
    check_takes,
    is_lossy,
    name_of,
)
from specdec_hf.schedules.base import Schedule
from specdec_kernels import RULES, TREE_RULES


@dataclass(frozen=True, eq=False)
class DraftChoice:
    """What may draft in a call, and the rule that may verify it.

    Attributes:
        drafter, tree, rule, num_assistant_tokens, num_assistant_tokens_schedule: as in `Options`.
        notes: on the choice.
        named: whether the caller names what drafts.
    """

    drafter: Any
    tree: Any
    rule: Any
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: str | Schedule | None
    notes: tuple[str, ...] = ()
    named: bool = False


def asked_choice(options: Options, assistant: Assistant) -> DraftChoice:
    """What the options and ``model.generate`` ask for; raises TypeError or ValueError by name."""
    layers = assistant.early_exit
    if layers is not None:
        layers = check_integer("assistant_early_exit", layers, 1)
    drafter, lookup = options.drafter, options.drafter == "prompt_lookup"
    asked = {
        "assistant_model": assistant.model,
        "prompt_lookup_num_tokens": "prompt_lookup" if assistant.lookup else None,
        "assistant_early_exit": layers and class_of("early_exit")(layers),
    }
    for name, wanted in asked.items():
        if wanted is None:
            continue
        if drafter not in (None, AUTO) and not (lookup and assistant.lookup):
            raise ValueError(f"drafter and {name} must not both be given")
        drafter, lookup = wanted, assistant.lookup
    if assistant.tokenizer is not None:
        if not is_language_model(drafter):
            raise ValueError(
                "assistant_tokenizer needs a draft model as drafter or assistant_model, "
                f"got drafter={shown(drafter)}"
            )
        make = plugins.load("other_vocabulary")
        drafter = make(drafter, assistant.tokenizer, assistant.target_tokenizer)
    if assistant.max_ngram is not None:
        if not lookup:
            raise ValueError(
                f"max_matching_ngram_size={assistant.max_ngram} needs drafter='prompt_lookup'"
            )
        drafter = class_of("prompt_lookup")(assistant.max_ngram, min(2, assistant.max_ngram))
    number, schedule = options.num_assistant_tokens, options.num_assistant_tokens_schedule
    if assistant.num_assistant_tokens is not None and not (
        assistant.from_model and (number is not None or options.tree is not None)
    ):
        number = resolve_num_assistant_tokens(
            number, assistant.num_assistant_tokens, tree=options.tree
        )
    if schedule is None and not (assistant.from_model and options.tree is not None):
        name = "num_assistant_tokens_schedule"
        schedule = COMMON[name].metadata["check"](name, assistant.schedule)
    threshold = assistant.confidence_threshold
    notes: tuple[str, ...] = ()
    if threshold is not None and drafter == AUTO:
        notes = (f"assistant_confidence_threshold={threshold} has no effect with drafter {AUTO!r}",)
    elif threshold is not None and drafter is not None:
        from specdec_hf.schedules.confidence import with_threshold  # noqa: PLC0415  # rare

        schedule = with_threshold(schedule or "constant", threshold)
    named = drafter != AUTO or options.tree is not None  # only drafters serve ``tree``
    return DraftChoice(drafter, options.tree, options.rule, number, schedule, notes, named)


def with_rule_of_ablation(call: Call, options: Options, asked: DraftChoice) -> DraftChoice:
    """Ablation is of rule token; raises ValueError for another one, or where nothing is drawn."""
    if options.ablate is None:
        return asked
    if not call.do_sample:
        raise ValueError(
            f"ablate={options.ablate!r} needs do_sample=True: greedy decoding draws no token"
        )
    if asked.rule not in ("auto", "token"):
        raise ValueError(
            f"rule must be 'auto' or 'token' with ablate={options.ablate!r}, "
            f"got {shown(asked.rule)}"
        )
    return replace(asked, rule="token")


def choices(model: Any, call: Call, asked: DraftChoice) -> list[Callable[[str], DraftChoice]]:
    """What to try, one after the other; each is told why the one before it was refused."""
    if asked.drafter != AUTO or asked.named:
        return [lambda reason: asked]
    refused = why_nothing_is_drafted(call, asked)
    if refused is not None:
        return [lambda reason: nothing(asked, refused)]
    for name in (AUTO, "suffix_automaton"):
        class_of(name)  # a module of ours that cannot be imported is no reason to draft otherwise
    return [
        lambda reason: default_tree(model, call, asked),
        lambda reason: default_chains(call, asked, reason),
        lambda reason: nothing(asked, reason),
    ]


def nothing(asked: DraftChoice, reason: str) -> DraftChoice:
    """Plain decoding where "auto" drafts nothing."""
    note = f"drafter {AUTO!r} drafts nothing: {reason}"
    return replace(asked, drafter=None, notes=(*asked.notes, note))


def why_nothing_is_drafted(call: Call, asked: DraftChoice) -> str | None:
    """Why "auto" tries no drafts in a call, None where it does."""
    if asked.num_assistant_tokens == 0:
        return "num_assistant_tokens is 0"
    if call.prefill is None:
        return None
    names = ", ".join(call.prefill.names)
    return f"whether drafts fit {names} is known after the prompt only; name a drafter to try"


def default_tree(model: Any, call: Call, asked: DraftChoice) -> DraftChoice:
    """All that drafts for the model in one tree, without its head where that cannot be used."""
    # Optimal goes by the clock, on which the text of a lossy rule would depend.
    lossy = is_lossy(rule_name(asked.rule)) and call.do_sample
    schedule = asked.num_assistant_tokens_schedule or ("constant" if lossy else "optimal")
    drafter, notes = class_of(AUTO)(), asked.notes
    try:
        drafter.has_head(model)
    except Refused as error:
        drafter = class_of(AUTO)(head=False)
        notes = (*notes, f"drafter {AUTO!r} drafts without the model's head: {error}")
    return replace(asked, drafter=drafter, num_assistant_tokens_schedule=schedule, notes=notes)


def default_chains(call: Call, asked: DraftChoice, reason: str) -> DraftChoice:
    """Rule match leaves the text to the seed alone, so that the benefit guard may pause drafting.

    Copied tokens are accepted as often under it as under token.
    """
    drafter, rule = class_of("suffix_automaton")(), asked.rule
    note = f"drafter {AUTO!r} drafts chains with {drafter.name}"
    if rule == "auto" and call.do_sample:
        rule = "match"
        note += f" and rule {rule!r}"
    return replace(asked, drafter=drafter, rule=rule, notes=(*asked.notes, f"{note}: {reason}"))


def resolve_rule(
    rule: Any,
    samples: bool,
    supported: Sequence[str],
    lossy: Sequence[str],
    *,
    trees: bool | None,
) -> str:
    """The acceptance rule of a call.

    "auto" is greedy without sampling, else the first rule that the drafter supports. A lossy rule
    that decides as greedy does without sampling is then called so, and a function `CUSTOM_RULE`.
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
        return supported[0] if samples else "greedy"
    choices = (*supported, *lossy)
    known = {*RULES, *TREE_RULES, *LOSSY_RULES}
    if rule not in known:
        raise ValueError(
            f"rule must be 'auto', {', '.join(map(repr, sorted(known)))} or a function, "
            f"got {rule!r}{did_you_mean(rule, known)}"
        )
    if rule not in choices:
        raise Refused(
            f"rule must be 'auto', {', '.join(map(repr, choices))} with this drafter, got {rule!r}"
        )
    if rule in GREEDY_WITHOUT_SAMPLING and not samples:
        return "greedy"
    if rule == "greedy" and samples:
        raise ValueError(
            "rule='greedy' needs do_sample=False or temperature 0: it would not keep the target's "
            "distribution"
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


def lossy_notes(options: Options, rule: str) -> list[str]:
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
