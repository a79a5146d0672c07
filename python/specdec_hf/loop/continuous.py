"""Batches that sequences join between two rounds: continuous batching.

The prompt of a sequence that joins is read by a session of its own, in chunks between which the
batch has rounds (chunked prefill). The first round of that session reads the last chunk and gives
the first token. Then the batch adopts the sequence, in the place of one that has ended. A batch
without such a place, or with too many of them, goes on as a larger or smaller session, which adopts
the sequences that have not ended. So `begin` is the only way in which a sequence begins, and
`Session.adopt` the only one in which its state moves.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.checks import describe
from specdec_hf.drafting.context import text_depends_on_drafts
from specdec_hf.loop.begin import begin
from specdec_hf.loop.output import end
from specdec_hf.loop.rounds import step
from specdec_hf.loop.session import Session
from specdec_hf.loop.statistics import SequenceStats
from specdec_hf.loop.streaming import Step
from specdec_hf.request.call import Call
from specdec_hf.runner.choose import choose_kind
from specdec_hf.runner.protocol import ROPES_BY_LENGTH, rope_types, to_device
from specdec_hf.runner.spec_runner import TOKENS_OF_A_PASS, SpecRunner

PREFILL_CHUNK_SIZE = 256  # tokens
# The call of one sequence, its seed, and whether it was cancelled; None where none waits. The
# argument is how many run.
Source = Callable[[int], tuple[Call, Any, Callable[[], bool]] | None]


def with_own_sampling(call: Call, device: Any) -> Call:
    """The call with sampling parameters that its session may change; see `Session.adopt`."""
    return replace(call, sampling=call.sampling.per_sequence(len(call.mask), device))


def run_continuous(
    session: Session, source: Source, prefill_chunk_size: int = PREFILL_CHUNK_SIZE
) -> Generator[Step, None, None]:
    """Run the rounds of a session, and of the sequences that join it.

    Between two rounds ``source`` is asked for sequences, one by one, until it has none or the
    prompts of enough tokens were read. In a batch that none can join it is never asked; a note says
    why.

    Args:
        session: has not begun; its call is one of `with_own_sampling`.
        source: gives calls of one sequence each, of text alone.
        prefill_chunk_size: about how many tokens of prompts are read between two rounds of
            sequences that run.

    Raises:
        ValueError: a call that cannot join the batch, by name.
    """
    reason = why_static(session) or _why_unlike_alone(session)
    if reason is not None:
        session.stats.note(f"sequences wait for the next batch: {reason}")
    reading: list[tuple[Session, Callable[[], bool]]] = []  # at most the first that waits
    while not session.done:
        yield from step(session)
        if reason is None:
            session = yield from _admit(session, source, reading, prefill_chunk_size)
    end(session)


def why_static(session: Session) -> str | None:
    """Why no sequence of this session can join a batch, or another one join it; None if it can."""
    call, drafter, schedule = session.call, session.drafter, session.length_policy.schedule
    if call.past is not None or call.prefill is not None or call.encoded is not None:
        return "it began with more than the ids of a prompt"
    if call.outputs:
        return f"it collects {', '.join(sorted(call.outputs))}"
    if not isinstance(session.runner, SpecRunner):
        return f"cache={session.runner.kind!r} holds what its sequences share"
    if session.stats.compiled is not None:
        return "CUDA graphs are made for one number of sequences"
    if kinds := rope_types(session.model) & set(ROPES_BY_LENGTH):
        return f"rotary embedding {min(kinds)!r} turns by the longest sequence of a forward"
    if drafter is not None and text_depends_on_drafts(session.rule):
        return f"under rule {session.rule!r} a text may depend on the round in which it begins"
    if drafter is not None and (drafter.makes_forward or not drafter.joins):
        return f"{describe(drafter)} cannot move a sequence from one call to another"
    if drafter is not None and not schedule.joins:
        return f"schedule {schedule.name!r} cannot move a sequence from one call to another"
    return None


def _why_unlike_alone(session: Session) -> str | None:
    """Why a sequence alone, or one of several, would be read otherwise than those of a session."""
    model, options, runner, (twin, _) = (
        session.model, session.options, session.runner, session.packing
    )  # fmt: skip
    assert isinstance(runner, SpecRunner)
    for count in (1, 2):
        try:
            chosen = choose_kind(
                model, count, "spec" if session.drafts_trees else options.cache,
                drafts=session.drafter is not None, tree=session.drafts_trees,
                self_check=options.self_check, twin=None if twin is None else twin.model,
            )  # fmt: skip
        except ValueError as error:
            return str(error)
        if chosen.kind != "spec":
            return f"a batch of {count} would have cache={chosen.kind!r}"
        if chosen.runs is not runner.model:
            return f"packed weights would serve only some of its sizes: {chosen.unlike}"
    return None


def _admit(
    session: Session,
    source: Source,
    reading: list[tuple[Session, Callable[[], bool]]],
    chunk: float,
) -> Generator[Step, None, Session]:
    """Read prompts, in their order; returns the session of the rounds to come.

    Where none waits for it, a prompt is read whole.

    Args:
        session: between two rounds.
        source: as in `run_continuous`.
        reading: holds the sequence whose prompt was read in part, if any; changed in place.
        chunk: how many tokens are read while others run.
    """
    running, joining = int(session.history.active.sum()), list[Session]()
    while chunk > 0 or not running + len(joining):
        if not reading:
            if (given := source(running + len(joining))) is None:
                break
            alone = _alone(session, *given[:2])
            _share_prefix(alone, [session, *joining])
            reading.append((alone, given[2]))
        alone, cancelled = reading[0]
        if cancelled():
            yield _cancel(alone)
            reading.clear()
            continue
        took, whole = yield from _read(alone, chunk if running + len(joining) else math.inf)
        chunk -= took
        if whole:
            reading.clear()
            joining += [] if alone.done else [alone]
    ended = np.flatnonzero(~session.history.active)
    wanted = running + len(joining)
    if len(joining) > len(ended) or 0 < 2 * wanted <= len(session.numbers):
        return _of_size(session, wanted, joining)
    for b, alone in zip(ended.tolist(), joining, strict=False):
        session.adopt(b, alone, 0)
    return session


def _alone(session: Session, call: Call, seed: Any) -> Session:
    """The session of one sequence before it joins, whose counts are those of the batch."""
    if len(call.mask) != 1 or call.beams is not None:
        raise ValueError(f"source must give one sequence at a time, got {len(call.mask)}")
    alone = _begin_like(session, with_own_sampling(call, session.model.device), seed)
    reason = why_static(alone)
    if reason is None and alone.rule != session.rule:
        reason = f"its rule is {alone.rule!r} in a batch of rule {session.rule!r}"
    if reason is not None:
        raise ValueError(f"source must give sequences that can join the batch: {reason}")
    alone.numbers = [len(session.stats.sequences)]
    session.stats.sequences.append(SequenceStats(prompt_tokens=int(alone.prompt_lengths[0])))
    session.stats.seeds += alone.seeds.tolist()
    return alone


@torch.inference_mode()
def _share_prefix(alone: Session, others: list[Session]) -> None:
    """Take the keys and values of what a prompt has in common with a text that runs.

    The last token of the prompt is read for its logits. Where a drafter reads hidden states, which
    are not kept, the whole prompt is read.
    """
    if alone.context is not None and alone.context.kept_states:
        return
    prompt = alone.history.tokens[0, : alone.prompt_lengths[0] - 1]
    common: list[tuple[int, Session, int]] = []
    for other in others:
        for b in np.flatnonzero(other.history.active).tolist():
            text = other.history.tokens[b, : min(len(prompt), int(other.runner.lengths[b]))]
            common.append((_length_of_prefix(text, prompt), other, b))
    size, other, b = max(common, key=operator.itemgetter(0), default=(0, alone, 0))
    if size:
        assert isinstance(alone.runner, SpecRunner)
        assert isinstance(other.runner, SpecRunner)
        alone.runner.adopt(0, other.runner, b, size)


def _length_of_prefix(text: NDArray[np.int64], prompt: NDArray[np.int64]) -> int:
    """How many tokens of a text, which is no longer than the prompt, are those of the prompt."""
    unlike = np.flatnonzero(text != prompt[: len(text)])
    return int(unlike[0]) if len(unlike) else len(text)


def _read(alone: Session, most: float) -> Generator[Step, None, tuple[float, bool]]:
    """Read about so many tokens of a prompt, first by the target and then by what drafts.

    Returns:
        How many tokens the target reads in that time, and whether all is read.
    """
    took = 0.0
    if alone.first_round:
        begin, end = int(alone.runner.lengths[0]), int(alone.prompt_lengths[0])
        size = end - begin if end - begin <= most else math.ceil(most)
        took = max(size, TOKENS_OF_A_PASS)
        if begin + size < end:
            _feed(alone, begin, size)
            return took, False
        yield from step(alone)
    if alone.done or alone.drafter is None:
        return took, True
    share, size = alone.drafter.relative_cost, int(alone.history.lengths[0])
    left = max(most - took, 0.0)
    if share * size > left:
        size = math.ceil(left / share)
    return took + share * size, _let_drafter_read(alone, size)


@torch.inference_mode()
def _feed(alone: Session, begin: int, size: int) -> None:
    """Read tokens of a prompt before its last; their logits are not used."""
    tokens = to_device(alone.history.tokens[:, begin : begin + size], alone.model.device)
    alone.runner.forward(tokens, alone.runner.lengths, 1)


@torch.inference_mode()
def _let_drafter_read(alone: Session, size: int) -> bool:
    """Let what drafts read the next tokens of a text; whether it has read all of it."""
    assert alone.drafter is not None
    return alone.drafter.read(alone.history.shown(), size) == 0


def _cancel(alone: Session) -> Step:
    """The last step of a sequence whose prompt is not read to its end."""
    alone.history.active[:] = False
    alone.stats.sequences[alone.numbers[0]].stop_reason = "cancelled"
    return Step(alone.numbers[0], [], [], [], "cancelled")


def _of_size(session: Session, size: int, joining: list[Session]) -> Session:
    """A session of the sequences that run and of those that join."""
    running = [(session, index) for index in np.flatnonzero(session.history.active).tolist()]
    moved = [*running, *((alone, 0) for alone in joining)]
    longest, index = max(moved, key=lambda place: int(place[0].history.lengths[place[1]]))
    call, index = longest.calls[index]
    resized = _begin_like(session, call.repeated(index, size, session.model.device), 0)
    for b, (other, index) in enumerate(moved):
        resized.adopt(b, other, index)
    session.length_policy.remember()
    return resized


def _begin_like(session: Session, call: Call, seed: Any) -> Session:
    """Another session with the options of a session, for its sequences or those that join."""
    drafter = None if session.drafter is None else session.drafter.fresh()
    options = replace(session.options, drafter=drafter, tree=None, seed=seed)
    return begin(session.model, call, options, session)
