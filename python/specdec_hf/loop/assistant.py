"""The drafts that the arguments of ``model.generate`` ask for, as options of the loop."""

from __future__ import annotations

from dataclasses import replace

from specdec_hf import plugins
from specdec_hf.arguments import check_integer, shown
from specdec_hf.drafters.copying import PromptLookupDrafter
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.drafting.registry import AUTO, class_of
from specdec_hf.options import Options, resolve_num_assistant_tokens
from specdec_hf.request.call import Assistant
from specdec_hf.request.inputs import is_language_model
from specdec_hf.schedules.confidence import with_threshold


def with_assistant(options: Options, assistant: Assistant) -> Options:
    """The options of the loop, completed by the arguments of ``model.generate`` about drafts.

    Raises:
        ValueError: the same is asked for in two ways.
    """
    if replace(assistant, target_tokenizer=None, from_model=False) == Assistant():
        return options
    drafter, lookup = options.drafter, options.drafter == "prompt_lookup"
    asked = {
        "assistant_model": assistant.model,
        "prompt_lookup_num_tokens": "prompt_lookup" if assistant.lookup else None,
        "assistant_early_exit": _early_exit(assistant.early_exit),
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
        drafter = PromptLookupDrafter(assistant.max_ngram, min(2, assistant.max_ngram))
    number, schedule = options.num_assistant_tokens, options.num_assistant_tokens_schedule
    if assistant.num_assistant_tokens is not None and not (
        assistant.from_model and (number is not None or options.tree is not None)
    ):
        number = resolve_num_assistant_tokens(
            number, assistant.num_assistant_tokens, tree=options.tree
        )
    if schedule is None and not (assistant.from_model and options.tree is not None):
        schedule = assistant.schedule
    named = drafter is not None and drafter != AUTO
    if assistant.confidence_threshold is not None and named:
        schedule = with_threshold(schedule or "constant", assistant.confidence_threshold)
    return replace(
        options,
        drafter=drafter,
        num_assistant_tokens=number,
        num_assistant_tokens_schedule=schedule,
    )


def _early_exit(layers: int | None) -> Drafter | None:
    """Raises ValueError for a number of layers below 1, by the name of Transformers."""
    if layers is None:
        return None
    made: Drafter = class_of("early_exit")(check_integer("assistant_early_exit", layers, 1))
    return made
