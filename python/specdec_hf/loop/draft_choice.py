"""What may draft in a call: what the caller asks for, and what drafter "auto" tries.

Where no drafter is named, "auto", a tree of everything that the library can draft for the model
comes first. Where the call or the model refuses trees, the suffix automaton drafts chains, and
where it refuses drafts, plain decoding answers. So "auto" raises only where plain decoding does
too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specdec_hf import plugins
from specdec_hf.arguments import Refused, check_integer, shown
from specdec_hf.drafting.registry import AUTO, class_of
from specdec_hf.options import COMMON, Options, resolve_num_assistant_tokens, rule_name
from specdec_hf.request.call import Assistant, Call
from specdec_hf.request.inputs import is_language_model
from specdec_hf.rules import is_lossy
from specdec_hf.schedules.base import Schedule


@dataclass(frozen=True, eq=False)
class DraftChoice:
    """What may draft in a call, and the rule that may verify it.

    Attributes:
        drafter, tree, rule, num_assistant_tokens, num_assistant_tokens_schedule: as in `Options`.
        notes: on the choice.
    """

    drafter: Any
    tree: Any
    rule: Any
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: str | Schedule | None
    notes: tuple[str, ...] = ()


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
    named = drafter is not None and drafter != AUTO
    if assistant.confidence_threshold is not None and named:
        from specdec_hf.schedules.confidence import with_threshold  # noqa: PLC0415  # rare

        schedule = with_threshold(schedule or "constant", assistant.confidence_threshold)
    return DraftChoice(drafter, options.tree, options.rule, number, schedule)


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


def beam_choice(call: Call, asked: DraftChoice) -> DraftChoice:
    """What drafts in a beam search, which "auto" leaves to itself."""
    assert call.beams is not None
    if asked.drafter != AUTO or asked.tree is not None:
        return asked
    return nothing(asked, f"num_beams={call.beams.num_beams} needs a draft model")


def nothing(asked: DraftChoice, reason: str | None) -> DraftChoice:
    """Plain decoding where "auto" drafts nothing."""
    return replace(asked, drafter=None, notes=(f"drafter {AUTO!r} drafts nothing: {reason}",))


def why_nothing_is_drafted(call: Call, asked: DraftChoice) -> str | None:
    """Why "auto" tries no drafts in a call, None where it does."""
    if asked.num_assistant_tokens == 0:
        return "num_assistant_tokens is 0"
    if call.prefill is None:
        return None
    names = ", ".join(call.prefill.names)
    return f"whether drafts fit {names} is known after the prompt only; name a drafter to try"


def default_tree(model: Any, call: Call, asked: DraftChoice, reason: str | None) -> DraftChoice:
    """All that drafts for the model in one tree, without its head where that cannot be used."""
    # Optimal goes by the clock, on which the text of a lossy rule would depend.
    lossy = is_lossy(rule_name(asked.rule)) and call.do_sample
    schedule = asked.num_assistant_tokens_schedule or ("constant" if lossy else "optimal")
    drafter, notes = class_of(AUTO)(), asked.notes
    try:
        drafter.has_head(model)
    except Refused as error:
        drafter = class_of(AUTO)(head=False)
        notes = (f"drafter {AUTO!r} drafts without the model's head: {error}",)
    return replace(asked, drafter=drafter, num_assistant_tokens_schedule=schedule, notes=notes)


def default_chains(model: Any, call: Call, asked: DraftChoice, reason: str | None) -> DraftChoice:
    """Rule match leaves the text to the seed alone, so that the benefit guard may pause drafting.

    Copied tokens are accepted as often under it as under token.
    """
    drafter, rule = class_of("suffix_automaton")(), asked.rule
    note = f"drafter {AUTO!r} drafts chains with {drafter.name}"
    if rule == "auto" and call.do_sample:
        rule = "match"
        note += f" and rule {rule!r}"
    return replace(asked, drafter=drafter, rule=rule, notes=(f"{note}: {reason}",))
