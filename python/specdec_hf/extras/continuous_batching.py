"""Batches that sequences join between two rounds: continuous batching.

Every sequence has a call of its own. Its prompt is read by a session of its own, in chunks between
which the batch has rounds (chunked prefill) and other prompts have their turns. The first round of
that session reads the last chunk and gives the first token. Then the batch takes the sequence, in
the place of one that has ended. Where no sequence runs, that session is the batch. A batch without
such a place, or with too many of them, goes on as a larger or smaller session, which takes the
sequences that have not ended. So `begin` is the only way in which a sequence begins, and
`Session.take` the only one in which its state moves.

Where sequences cannot join, those that wait when a batch begins are one padded batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import StoppingCriteriaList

from specdec_hf.arguments import check_integer
from specdec_hf.extras.joins import (
    CannotJoinError,
    check_joins,
    ropes_by_length,
    why_not_text_alone,
    why_static,
    why_unlike_alone,
)
from specdec_hf.extras.prefix_cache import Prefix, PrefixCache, SharedPrefixes
from specdec_hf.loop.begin import begin
from specdec_hf.loop.output import end
from specdec_hf.loop.plan import token_budgets
from specdec_hf.loop.rounds import step
from specdec_hf.loop.session import Session
from specdec_hf.loop.statistics import SequenceStats, SpecStats
from specdec_hf.loop.streaming import Step
from specdec_hf.request.call import Call
from specdec_hf.request.sampling import Sampling, sequence_seeds
from specdec_hf.runner.protocol import TOKENS_OF_A_PASS, to_device

PREFILL_CHUNK_SIZE = 256  # tokens


@dataclass
class Asked:
    """A call whose sequences are decoded together with those of other calls.

    Attributes:
        call: its sampling parameters become tensors.
        device: the model's.
        seeds: as ``seed`` of `generate`; then one of each sequence.
        cancelled: whether it was given up.
        prefix: what its sequences may take of other texts.
    """

    call: Call
    device: InitVar[torch.device]
    seeds: Any
    cancelled: Callable[[], bool]
    prefix: Prefix = field(default_factory=Prefix)

    def __post_init__(self, device: torch.device) -> None:
        call, count = self.call, len(self.call.mask)
        self.seeds = sequence_seeds(
            self.seeds, count, do_sample=call.do_sample,
            num_return_sequences=call.output.num_return_sequences,
        )  # fmt: skip
        self.call = replace(call, sampling=call.sampling.per_sequence(count, device))


# None where none waits. The argument is how many run.
Source = Callable[[int], Asked | None]


def run_continuous(
    model: Any,
    start: Callable[[Call, Any], Session],
    first: Asked,
    source: Source,
    prefill_chunk_size: int | None = None,
    *,
    prefix_cache: PrefixCache | None = None,
    records_graphs: bool = False,
) -> Generator[Step, None, SpecStats]:
    """Run the rounds of a batch that sequences join.

    Between two rounds, and between two chunks of prompts, ``source`` is asked for a sequence. Where
    none can join, it is asked before the first round alone, until it has none, and a note says why.

    Args:
        model: the target.
        start: begins a batch with the seeds of its sequences.
        first: begins the batch.
        source: gives calls of one sequence each, of text alone.
        prefill_chunk_size: about how many tokens of prompts are read between two rounds of
            sequences that run; None is `PREFILL_CHUNK_SIZE`.
        prefix_cache: keeps the texts that end for later prompts, where sequences join.
        records_graphs: whether forwards are recorded for a number of sequences when it is begun.

    Raises:
        ValueError: a call that cannot join the batch, by name.
    """
    reason = "CUDA graphs are made for one number of sequences" if records_graphs else None
    session = None if records_graphs else start(first.call, first.seeds)
    if session is not None:
        reason = why_static(session) or why_unlike_alone(session)
    given = [first] if reason is None else [first, *_those_that_wait(model, first, source)]
    if session is None or len(given) > 1:
        if session is not None:
            session.borrower.held = False
        session = _start_together(start, given)
    session.isolates = True
    borrower, stats = session.borrower, session.stats
    cancels = [one.cancelled for one in given for _ in one.call.mask]
    shared = _shared(session, given, reason, prefix_cache)
    prompts = _Prompts(session, source, prefill_chunk_size or PREFILL_CHUNK_SIZE, cancels, shared)
    batch: Session | None = session
    if reason is not None:
        stats.note(f"sequences wait for the next batch: {reason}")
    elif len(first.call.mask) == 1:
        prompts.reading.append(_Prompt(first, 0, session))
        batch = None
    del session  # the batch may go on in another one
    try:
        while prompts.wait or (batch is not None and not batch.done):
            if batch is not None:
                yield from _round(batch, cancels, shared)
            if reason is None:
                batch = yield from prompts.read(batch)
        end(prompts.like if batch is None else batch)
    finally:
        borrower.held = False
    return stats


def _shared(
    session: Session, given: list[Asked], reason: str | None, store: PrefixCache | None
) -> SharedPrefixes:
    """The prefixes of a batch, which no sequence can join for a reason, or those with ``store``."""
    if store is not None:
        if reason is not None:
            store.reason = f"sequences wait for the next batch: {reason}"
        elif store.open(session):
            shared = SharedPrefixes(store, [one.prefix for one in given for _ in one.call.mask])
            shared.watch(session)
            return shared
        if reason is None and store.reason:
            session.stats.note(f"no text is kept for later prompts: {store.reason}")
    return SharedPrefixes(None, [one.prefix for one in given for _ in one.call.mask])


def _round(
    batch: Session, cancels: list[Callable[[], bool]], shared: SharedPrefixes
) -> Generator[Step, None, None]:
    """A round of those that were not given up; the texts that end are kept."""
    running = batch.history.active.copy()
    yield from _end_cancelled(batch, cancels)
    if not batch.done:
        yield from step(batch)
    for b in np.flatnonzero(running & ~batch.history.active).tolist():
        shared.keep(batch, b)


def _those_that_wait(model: Any, first: Asked, source: Source) -> list[Asked]:
    """The sequences that begin together with the first, which none can join later."""
    waiting: list[Asked] = []
    alone = len(first.call.mask) > 1 or why_not_text_alone(first.call) is not None
    if alone or ropes_by_length(model):
        return waiting
    while (given := source(1 + len(waiting))) is not None:
        check_joins(given.call)
        if given.call.do_sample != first.call.do_sample:
            raise CannotJoinError(f"do_sample={given.call.do_sample} is not that of the batch")
        waiting.append(given)
    return waiting


def _start_together(start: Callable[[Call, Any], Session], given: list[Asked]) -> Session:
    """A session of the sequences of several calls, each of which ends as its own call says."""
    if len(given) == 1:
        return start(given[0].call, given[0].seeds)
    calls = [(one.call, 0) for one in given]
    session = start(padded_together(calls), [seed for one in given for seed in one.seeds])
    session.sequences.calls = calls
    session.sequences.budgets = np.concatenate(
        [token_budgets(session.model, call)[1] for call, _ in calls]
    )
    return session


def _end_cancelled(
    batch: Session, cancels: list[Callable[[], bool]]
) -> Generator[Step, None, None]:
    """End the sequences of a batch that were given up."""
    for b in np.flatnonzero(batch.history.active).tolist():
        if cancels[batch.sequences.numbers[b]]():
            batch.history.active[b] = False
            yield _ended(batch.stats, batch.sequences.numbers[b], "cancelled")


def _ended(stats: SpecStats, number: int, reason: str, error: Exception | None = None) -> Step:
    """The last step of a sequence that ends between two rounds."""
    stats.sequences[number].stop_reason = reason
    return Step(number, [], [], [], reason, error=error)


@dataclass
class _Prompt:
    """A prompt that is read, or waits for its first turn; its session has begun in that turn."""

    asked: Asked
    number: int
    session: Session | None = None


@dataclass
class _Prompts:
    """The prompts that are read in turn, a chunk at a time, and then join a batch.

    Attributes:
        like: a session of the batch, whose options all others have.
        source, chunk, cancels, shared: as in `run_continuous`.
        reading: in the order of their turns, but for the one ``served`` last, which lets those
            that come meanwhile go first.
    """

    like: Session
    source: Source
    chunk: int
    cancels: list[Callable[[], bool]]
    shared: SharedPrefixes
    reading: deque[_Prompt] = field(default_factory=deque)
    served: _Prompt | None = None

    @property
    def wait(self) -> bool:
        """Whether there are any."""
        return bool(self.reading) or self.served is not None

    def read(self, batch: Session | None) -> Generator[Step, None, Session | None]:
        """Read about a chunk of tokens; returns the batch of the rounds to come.

        Args:
            batch: between two rounds; None where no sequence has run yet.
        """
        self.like = self.like if batch is None else batch
        running = 0 if batch is None else int(batch.history.active.sum())
        left, joining, asks = float(self.chunk), list[Session](), True
        while left > 0:
            if asks:
                asks = self._ask(running + len(joining))
            if self.served is not None:
                self.reading.append(self.served)
                self.served = None
            if not self.reading:
                break
            one = self.reading.popleft()
            if one.asked.cancelled():
                yield _ended(self.like.stats, one.number, "cancelled")
                if one.session is not None:
                    self.shared.keep(one.session, 0)
                asks = True
                continue
            try:
                alone = one.session = one.session or self._begin(one)
                reading = [other.session for other in self.reading if other.session is not None]
                others = [*joining, *reading] if batch is None else [batch, *joining, *reading]
                self.shared.share(alone, others)
                took, whole = yield from _read(alone, left)
            except CannotJoinError:
                raise
            except Exception as error:  # whatever its beginning, forward or drafter raises
                yield _ended(self.like.stats, one.number, "error", error)
                asks = True
                continue
            left -= took
            if not whole:
                self.served = one
            elif not alone.done:
                joining.append(alone)
            else:
                self.shared.keep(alone, 0)
                asks = True
        return self._joined(batch, joining)

    def _ask(self, running: int) -> bool:
        """Let the next sequence of the source wait for its turn; whether there was one."""
        waiting = len(self.reading) + (self.served is not None)
        given = self.source(running + waiting)
        if given is None:
            return False
        check_joins(given.call)
        stats = self.like.stats
        self.reading.append(_Prompt(given, len(stats.sequences)))
        self.cancels.append(given.cancelled)
        self.shared.prefixes.append(given.prefix)
        stats.sequences.append(SequenceStats(prompt_tokens=int(given.call.mask.sum())))
        stats.seeds += given.seeds
        return True

    def _begin(self, one: _Prompt) -> Session:
        """The session of a sequence before it joins, whose counts are those of the batch."""
        alone = _begin_like(self.like, one.asked.call, one.asked.seeds)
        reason = why_static(alone)
        if reason is None and alone.rule != self.like.rule:
            reason = f"its rule is {alone.rule!r} in a batch of rule {self.like.rule!r}"
        if reason is not None:
            raise CannotJoinError(reason)
        alone.sequences.numbers = [one.number]
        return self.shared.watch(alone)

    def _joined(self, batch: Session | None, joining: list[Session]) -> Session | None:
        """The batch with the sequences that join."""
        running = 0 if batch is None else int(batch.history.active.sum())
        wanted = running + len(joining)
        if batch is None or not running:
            if wanted == 0:
                return batch
            if wanted == 1:
                self._leave(batch)
                return joining[0]
        # Keys and values that are not finite stay where they are, since masks multiply them by 0.
        ended = [] if batch is None else [
            b for b in np.flatnonzero(~batch.history.active).tolist()
            if batch.stats.sequences[batch.sequences.numbers[b]].stop_reason != "error"
        ]  # fmt: skip
        if batch is None or len(joining) > len(ended) or 2 * wanted <= len(batch.sequences.numbers):
            return self._of_size(batch, joining)
        for b, alone in zip(ended, joining, strict=False):
            self.shared.move(batch, b, alone, 0)
        return batch

    def _of_size(self, batch: Session | None, joining: list[Session]) -> Session:
        """A session of the sequences that run and of those that join."""
        moved = [(alone, 0) for alone in joining]
        if batch is not None:
            running = np.flatnonzero(batch.history.active).tolist()
            moved = [*((batch, index) for index in running), *moved]
        call = padded_together([session.sequences.calls[index] for session, index in moved])
        resized = self.shared.watch(_begin_like(self.like, call, 0))
        for b, (other, index) in enumerate(moved):
            self.shared.move(resized, b, other, index)
        self._leave(batch)
        return resized

    def _leave(self, batch: Session | None) -> None:
        if batch is not None:
            batch.length_policy.remember()


def _read(alone: Session, most: float) -> Generator[Step, None, tuple[float, bool]]:
    """Read about so many tokens of a prompt, first by the target and then by what drafts.

    Returns:
        How many tokens the target reads in that time, and whether all is read.
    """
    took = 0.0
    if alone.first_round:
        begin, end = int(alone.runner.lengths[0]), int(alone.sequences.prompt_lengths[0])
        size = end - begin if end - begin <= most else math.ceil(most)
        took = max(size, TOKENS_OF_A_PASS)
        if begin + size < end:
            _feed(alone, begin, size)
            return took, False
        yield from step(alone)
    if alone.done or alone.state is None:
        return took, True
    share, size = alone.state.cost.relative, int(alone.history.lengths[0])
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
    assert alone.state is not None
    left = alone.state.read(alone.history.read_only(), size)
    return check_integer(f"{type(alone.state).__name__}.read", left, 0) == 0


def _begin_like(session: Session, call: Call, seed: Any) -> Session:
    """Another session with the options of a session, for its sequences or those that join."""
    begun = begin(session.model, call, session.options, seed, session)
    begun.isolates = True
    return begun


def padded_together(places: Sequence[tuple[Call, int]]) -> Call:
    """A call of sequences of several calls, of text alone, padded on the left.

    What only one sequence may say of itself, its length, its ends and its criteria, stays with the
    call that it is from, as `Session.calls` has it.

    Args:
        places: calls whose sampling parameters are tensors, each with the index of a sequence.
    """
    width = max(call.mask.shape[1] for call, _ in places)

    def padded(name: str) -> NDArray[Any]:
        rows = (getattr(call, name)[index] for call, index in places)
        return np.stack([np.pad(row, (width - len(row), 0)) for row in rows])

    first, _ = places[0]
    sampling = {
        name: torch.stack([getattr(call.sampling, name)[index] for call, index in places])
        for name in first.sampling.to_dict()
    }
    return replace(
        first,
        input_ids=padded("input_ids"),
        mask=padded("mask"),
        stopping=replace(
            first.stopping,
            max_new_tokens=max(call.stopping.max_new_tokens for call, _ in places),
            criteria=StoppingCriteriaList(),
        ),
        output=replace(first.output, num_return_sequences=1, num_top_logprobs=()),
        sampling=Sampling(**sampling),
        processors=[call.processors[index] for call, index in places],
        notes=list(dict.fromkeys(note for call, _ in places for note in call.notes)),
    )
