"""Whether sequences can join a batch, and be decoded as each would be alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec_hf.arguments import Refused
from specdec_hf.drafting.checks import describe
from specdec_hf.loop.session import Session
from specdec_hf.request.call import Call
from specdec_hf.rules import text_depends_on_drafts
from specdec_hf.runner.choose import choose_cache
from specdec_hf.runner.protocol import ROPES_BY_LENGTH, rope_types


class CannotJoinError(ValueError):
    """A source gave what no batch takes: a fault of the program and not of a sequence."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"source must give sequences that can join the batch: {reason}")


def check_joins(call: Call) -> None:
    """Raise ValueError for a call that cannot be one of a batch."""
    if len(call.mask) != 1 or call.beams is not None:
        raise ValueError(f"source must give one sequence at a time, got {len(call.mask)}")
    if (reason := why_not_text_alone(call)) is not None:
        raise CannotJoinError(reason)


def why_static(session: Session) -> str | None:
    """Why no sequence of this session can join a batch, or another one join it; None if it can."""
    call, drafter, state = session.call, session.drafter, session.state
    schedule = session.length_policy.schedule
    if (reason := why_not_text_alone(call)) is not None:
        return reason
    if not session.runner.has_slots:
        return f"cache={session.runner.kind!r} holds what its sequences share"
    if session.stats.compiled is not None:
        return "CUDA graphs are made for one number of sequences"
    if kinds := ropes_by_length(session.model):
        return f"rotary embedding {min(kinds)!r} turns by the longest sequence of a forward"
    if drafter is not None and text_depends_on_drafts(session.rule):
        return f"under rule {session.rule!r} a text may depend on the round in which it begins"
    assert (state is None) == (drafter is None)
    if drafter is not None and (drafter.needs.target_forward or not (state and state.joins)):
        return f"{describe(drafter)} cannot move a sequence from one call to another"
    if drafter is not None and not schedule.joins:
        return f"schedule {schedule.name!r} cannot move a sequence from one call to another"
    return None


def ropes_by_length(model: Any) -> set[str]:
    """The rotary embeddings with which a text depends on longer ones beside it."""
    return rope_types(model) & set(ROPES_BY_LENGTH)


def why_not_text_alone(call: Call) -> str | None:
    """Why the sequences of a call cannot be decoded with those of others; None if they can."""
    if call.past is not None or call.prefill is not None or call.encoded is not None:
        return "it began with more than the ids of a prompt"
    if call.output.per_token:
        return f"it collects {', '.join(sorted(call.output.per_token))}"
    return None


def why_unlike_alone(session: Session) -> str | None:
    """Why a sequence alone, or one of several, would be read otherwise than those of a session."""
    runner, (packed_model, _) = session.runner, session.plan.packing
    for count in (1, 2):
        request = replace(session.plan.request, batch_size=count, prompt=None)
        try:
            chosen = choose_cache(session.model, request, packed_model)
        except Refused as error:
            return str(error)
        if not chosen.kind.has_slots:
            return f"a batch of {count} would have cache={chosen.kind.name!r}"
        if chosen.model is not runner.model:
            return f"packed weights would serve only some of its sizes: {chosen.why_not_packed}"
    return None
