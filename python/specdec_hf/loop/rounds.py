"""One round of speculative decoding: draft, one forward of the target, verify, commit.

Terms:

- pending token: the last committed token of a sequence. The target's next forward reads it, and its
  key and value are then cached.
- round: one forward of the target over the pending token and the drafts of every sequence. It emits
  the accepted drafts, then the recovered token after a rejection or else the bonus token.
- chain: drafts that follow one another. Tree: drafts with several continuations of one prefix.
  `DraftedRound` alone knows them apart; everything else is the same for both.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.loop.commit import DraftCounts, Taken, commit, cut, read_verdict
from specdec_hf.loop.drafted import DraftedRound
from specdec_hf.loop.output import SpecOutput, finish
from specdec_hf.loop.session import Session
from specdec_hf.loop.statistics import Phases, RoundRecord
from specdec_hf.loop.streaming import Step, Streamer, put_step, run_stream
from specdec_hf.runner.protocol import rereads_at_rope_switch, tokens_before_rope_switch
from specdec_hf.schedules.base import Outcome


def rounds(session: Session) -> Generator[Step, None, SpecOutput]:
    """Run all rounds of a session, step by step; the generator returns its output."""
    try:
        while not session.done:
            yield from step(session)
        return finish(session)
    finally:
        session.borrower.held = False


def run(session: Session, streamer: Streamer | None = None) -> Any:
    """Run all rounds of a session; returns its output."""
    with closing(rounds(session)) as steps:  # also where a streamer raises
        _, output = run_stream(steps, partial(put_step, streamer))
    if streamer is not None:
        streamer.end()
    return output if session.call.output.return_dict else output.sequences


@torch.inference_mode()
def step(session: Session) -> list[Step]:
    """Run one round; returns what it appended to each sequence that was still active."""
    phases = Phases(session.options.clock, session.runner)
    if _reads_again(session) and session.runner.has_slots:
        session.runner.truncate(np.zeros_like(session.runner.lengths))  # others do it themselves
    before, drafted = _RoundStart(session), DraftedRound(session)
    phases.begin("draft")
    if not _propose_known(session, drafted):
        limits = draft_limits(session)
        if limits.any():
            drafted.propose(limits)
    phases.begin("target")
    raw, session.first_logits = session.first_logits, None
    verdict: Any = None
    if raw is None and session.stats.compiled is not None:
        from specdec_hf.extras.compiled.verification import verify_in_graph  # noqa: PLC0415  # GPU

        verdict = verify_in_graph(session, drafted)
    if raw is None and verdict is None:
        raw = drafted.forward()
    phases.begin("verification")
    asked: Any = None
    logits: Any = raw  # None where the graph of the forward has verified
    errors = dict[int, Exception]()
    observed, allowed = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    if raw is not None:
        if any(session.processors):
            from specdec_hf.extras.processors import process_logits  # noqa: PLC0415  # not in most

            logits, errors, allowed = process_logits(session, raw, drafted.layout)
        verdict = drafted.verify(logits, **allowed)
        drafted.keep_path(verdict)
        asked = _asked(session)
        observed = {} if asked is None else asked.observed(session, drafted, logits)
    read = read_verdict(verdict, {**drafted.to_read(verdict), **observed})
    phases.begin("host")
    candidates = asked.candidates(session, read.draft) if asked and observed else None
    taken = cut(session, read, errors)
    counts = drafted.count(taken)
    top_logprobs: dict[int, Any] = {}
    if any(call.output.num_top_logprobs for call, _ in session.sequences.calls):
        from specdec_hf.extras.asked_of_rounds import likeliest  # noqa: PLC0415  # rarely asked for

        top_logprobs = likeliest(session, drafted, taken, logits)
    steps = commit(session, taken, counts, top_logprobs, drafted.predicted)
    phases.begin("draft")
    if session.drafter is not None and session.state is not None:
        rejections = asked and asked.rejections(session, drafted, taken, counts, logits)
        done = drafted.round(taken, candidates, rejections)
        session.state.commit(session.history.read_only(), done)
    phases.begin("host")
    _record_rows(session, before, drafted, taken, raw, logits)
    _record_round(session, before, phases, counts, taken, drafted)
    if session.options.trace is not None:
        session.options.trace(drafted.traced(logits, verdict, steps))
    return steps


class _RoundStart:
    """The part of a session that a round changes and its record needs, as it was before."""

    def __init__(self, session: Session) -> None:
        self.active = session.history.active.copy()
        self.lengths = session.history.lengths.copy()
        self.padding_fed = None if session.runner.rolls_back else session.padding_fed
        self.first_round = session.first_round
        self.not_cached = int((self.lengths - session.runner.lengths).max())  # tokens
        self.cuda_graphs = session.stats.cuda_graphs


def draft_limits(session: Session) -> NDArray[np.int64]:
    """[B], how deep each sequence drafts by budget, context, schedule and guard."""
    most = np.zeros_like(session.sequences.budgets)
    return session.length_policy.limits(most if session.drafter is None else _max_depths(session))


def _max_depths(session: Session) -> NDArray[np.int64]:
    """[B], how deep each sequence may draft by budget and context."""
    most = np.zeros_like(session.sequences.budgets)
    if not (session.first_round or _reads_again(session)):
        # The round emits one token beyond the drafts, so the last budgeted token is never drafted.
        left = session.sequences.budgets - session.new_tokens - 1
        most = np.where(session.history.active, left, 0)
        most[np.isin(session.history.last(1)[:, 0], session.ids_without_position)] = 0
        most = np.minimum(most, _tokens_before_rope_switch(session, most))
    return most


def _propose_known(session: Session, drafted: DraftedRound) -> bool:
    """Draft what calls bring; whether there is something."""
    calls = session.sequences.calls
    if not any(call.assistant.predictions or call.processors[index] for call, index in calls):
        return False
    from specdec_hf.extras.known_drafts import propose_known  # noqa: PLC0415  # rarely there

    return propose_known(session, drafted, _max_depths(session))


def _reads_again(session: Session) -> bool:
    """Whether plain generation reads the whole text again in the next round."""
    longest = int(session.history.lengths.max())
    return (
        rereads_at_rope_switch(session.model)
        and tokens_before_rope_switch(session.model, longest - 1) == 0
    )


def _tokens_before_rope_switch(session: Session, most: NDArray[np.int64]) -> int:
    """How deep drafts may be, so that the target's angles change where they do without drafts."""
    lengths = session.history.lengths
    deepest = 0 if session.drafter is None else session.drafter.depth
    room = tokens_before_rope_switch(session.model, int(lengths.max()))
    if room is None:
        return int(most.max())
    if len(lengths) > 1 and (lengths + most).max() >= lengths.max() + room:
        # Where the longest sequence turns the others too, they must not be ahead of it.
        session.stats.note(
            "nothing is drafted until the longest sequence of the batch has turned the angles of "
            "all by its rotary embedding"
        )
        return 0
    return room if deepest <= room else 0


def _asked(session: Session) -> Any:
    """What drafters may ask about a round, where this one asks, else None."""
    needs = None if session.drafter is None else session.drafter.needs
    if needs is None or not (needs.candidates or needs.rejections):
        return None
    from specdec_hf.extras import asked_of_rounds  # noqa: PLC0415  # few drafters ask

    return asked_of_rounds


def _record_rows(
    session: Session,
    before: _RoundStart,
    drafted: DraftedRound,
    taken: Taken,
    raw: torch.Tensor | None,
    logits: torch.Tensor,
) -> None:
    """Keep what drafters and the caller want of the rows of the committed tokens."""
    kept_states = (session.drafter_call and session.drafter_call.kept_states) or []
    outputs = session.outputs
    if not kept_states and outputs is None:
        return
    hidden, rows = session.runner.tap.pop(), drafted.rows(taken)
    new = session.history.lengths - before.lengths
    for states in kept_states:
        chosen = np.where(np.arange(rows.shape[1]) < new[:, None], rows, -1)
        states.record(hidden, before.lengths, chosen, drafted.tokens.shape[1] + 1)
    if outputs is None:
        return
    assert raw is not None
    if not session.runner.rolls_back:
        from specdec_hf.extras.processors import process_ended  # noqa: PLC0415  # rarely asked for

        # Every sequence has a row of every round, also where it had ended.
        logits = process_ended(session, logits, 1 - new, before.padding_fed)
        new = np.ones_like(new)
    outputs.record(raw, logits, hidden, rows, new)


def _record_round(
    session: Session,
    before: _RoundStart,
    phases: Phases,
    counts: DraftCounts,
    taken: Taken,
    drafted: DraftedRound,
) -> None:
    """Let the schedule and the guard learn from a round, and record it."""
    kept = taken.num_accepted
    outcome = Outcome(
        drafted=np.where(before.active, counts.depths, 0),
        accepted=kept,
        rejected=(counts.tried > kept) & before.active,
    )
    phases.stop()
    made: dict[str, Any] = {
        "began": phases.began - session.plan.started,
        "drafted": np.where(before.active, counts.drafted, 0).tolist(),
        "accepted": kept.tolist(),
        "emitted": [len(ids) for ids in taken.tokens],
    }
    width, schedule = drafted.tokens.shape[1], dict[str, Any]()
    if not drafted.known:
        schedule = session.length_policy.learn(
            RoundRecord(**made, **phases.seconds), outcome, width,
            prompt=before.not_cached if before.first_round else None,
            recorded=session.stats.cuda_graphs != before.cuda_graphs,
        )  # fmt: skip
    if phases.real:
        phases.stop()
    session.stats.record_round(width, RoundRecord(**made, **phases.seconds, schedule=schedule))
