"""The drafter that serves a call in the place of "auto".

A tree of everything that the library can draft for the model comes first. Where the call or the
model refuses trees, the suffix automaton drafts chains, and where it refuses drafts, plain decoding
answers. So "auto" raises only where plain decoding does too. The choice depends on the call and the
model alone, and is made before anything of the call runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec_hf.cache.choose import choose_kind
from specdec_hf.cache.plain import Prompt
from specdec_hf.decode.check_options import check_options
from specdec_hf.decode.draft_length import check_schedule
from specdec_hf.decode.rules import resolve_rule
from specdec_hf.decode.session import Options
from specdec_hf.drafters.drafter import rules_of
from specdec_hf.drafters.model_free.suffix_automaton import SuffixAutomatonDrafter
from specdec_hf.drafters.registry import AUTO
from specdec_hf.drafters.trees.auto import AutoDrafter
from specdec_hf.hf_arguments.call import Call
from specdec_hf.schedules.registry import make_schedule


def choose_drafter(model: Any, call: Call, options: Options) -> tuple[Options, list[str]]:
    """The options of a call without "auto", and notes for the statistics.

    A drafter that was named stays, and so does "auto" with ``tree``, which only drafters serve.

    Args:
        model: the target.
        call: its arguments.
        options: those of the loop.
    """
    if options.drafter != AUTO or options.tree is not None:
        return options, []
    reason = _why_nothing_is_drafted(call)
    if reason is None:
        try:
            return _with_usable_head(model, _served(model, call, _with_tree(options)))
        except (ValueError, ImportError) as error:  # the native module of the suffix automaton
            reason = str(error)
        try:
            chains = _served(model, call, _with_chains(call, options))
            drafts = f"drafts chains with {chains.drafter.name}"
            if chains.rule != options.rule:
                drafts += f" and rule {chains.rule!r}"
            note = f"drafter {AUTO!r} {drafts}: {reason}"
            return chains, [note]
        except (ValueError, ImportError) as error:
            reason = str(error)
    return replace(options, drafter=None), [f"drafter {AUTO!r} drafts nothing: {reason}"]


def _why_nothing_is_drafted(call: Call) -> str | None:
    if call.beams is not None:
        return f"num_beams={call.beams.num_beams} needs a draft model"
    if call.prefill is not None:
        names = ", ".join(call.prefill.names)
        return f"whether drafts fit {names} is known after the prompt only; name a drafter to try"
    return None


def _with_tree(options: Options) -> Options:
    schedule = options.num_assistant_tokens_schedule or "optimal"
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
    sampled = options.rule == "auto" and call.do_sample
    return replace(
        options, drafter=SuffixAutomatonDrafter(), rule="match" if sampled else options.rule
    )


def _served(model: Any, call: Call, options: Options) -> Options:
    """The same options; ValueError where the call or the model refuses their drafter."""
    drafter = options.drafter
    resolve_rule(options.rule, call.do_sample, rules_of(drafter))
    check_schedule(make_schedule(options.num_assistant_tokens_schedule or "constant"), drafter)
    check_options(call, options, drafter)
    choose_kind(
        model,
        len(call.mask),
        options.cache,
        tree=drafter.size > 0,
        self_check=options.self_check,
        prompt=Prompt(call.prompt_ids, call.mask),
        encoded=call.encoded,
    )
    return options
