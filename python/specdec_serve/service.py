"""What the routes share: sequences of the queue, limits, and clients that leave."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from specdec_hf.detokenizer import StopCriterion
from specdec_hf.extras.grammar import GrammarLimitError
from specdec_hf.loop.streaming import Step
from specdec_hf.request.sampling import sequence_seeds
from specdec_hf.runner.protocol import context_length

from specdec_serve.batch_queue import BatchQueue, QueuedSequence
from specdec_serve.constraints import Constraints
from specdec_serve.encoder import Continuation, Encoder, Prompt
from specdec_serve.faults import Fault
from specdec_serve.fields import SamplingFields
from specdec_serve.growing_text import GrowingText, Piece
from specdec_serve.metrics import Metrics, TextMetrics


@dataclass(frozen=True)
class Limits:
    """What one request, and all that are open, may ask for.

    Attributes:
        max_waiting: texts beyond those of a batch, encoded or not; another one gets status 429.
        max_new_tokens: most tokens of an answer, and of a chat that names no number.
        max_body: bytes of a request.
    """

    max_waiting: int = 64
    max_new_tokens: int = 512
    max_body: int = 2**20


class Service:
    """Submits the sequences of requests, and cancels those whose client has gone.

    Attributes:
        queue: open where the application runs.
        encoder: of the prompts; it runs with the queue.
        places: taken by the texts of requests, from before they are encoded.
        metrics: of all of them.
        open: sequences that a client still waits for, by their identity.
    """

    def __init__(self, queue: BatchQueue, tokenizer: Any, limits: Limits) -> None:
        self.queue, self.tokenizer, self.limits = queue, tokenizer, limits
        context = None if queue.model is None else context_length(queue.model)
        self.encoder = Encoder(tokenizer, context)
        self.constraints = Constraints(queue.model, tokenizer)
        self.places = 0
        kept = queue.prefix_cache
        self.metrics = Metrics({
            "texts_running": ("texts that are decoded", lambda: queue.num_running),
            "texts_waiting": ("encoded texts that wait for the batch", lambda: queue.num_waiting),
            "texts_open": ("texts of open requests, encoded or not", lambda: self.places),
            "prefix_cache_bytes": ("memory of the prefix cache", lambda: kept.bytes),
            "prefix_cache_texts": ("texts that the prefix cache keeps", lambda: len(kept)),
        }, {
            "prefix_cache_queries": ("prompts that were looked up", lambda: kept.queries),
            "prefix_cache_hits": ("of them, those that took something", lambda: kept.hits),
            "prefix_cache_tokens": ("tokens that these took", lambda: kept.reused_tokens),
            "prefix_cache_evictions": ("texts that went for a newer one", lambda: kept.evictions),
        })  # fmt: skip
        self.open: dict[int, QueuedSequence] = {}
        self._ends = False

    def _num_new_tokens(self, field: str, given: int | None, default: int, prompt: int) -> int:
        """How many tokens follow a prompt of so many; ``default`` shrinks to what the model has."""
        limit = self.limits.max_new_tokens
        if given is None:
            context = context_length(self.queue.model)
            left = limit if context is None else context - prompt
            return max(1, min(default, limit, left))
        if given > limit:
            raise Fault(400, f"{field} must be at most {limit}, got {given}", param=field)
        return given

    @asynccontextmanager
    async def submitted(
        self,
        request: Request,
        fields: tuple[str, str],
        prompts: Sequence[Prompt],
        length: tuple[int | None, int],
        asked: SamplingFields,
        num_top_logprobs: int | None = None,
        stop: Sequence[str] = (),
    ) -> AsyncIterator[list[QueuedSequence]]:
        """The sequences of a request; within this its client is watched.

        Args:
            request: whose client may leave.
            fields: names of the prompt and of the length, for messages.
            prompts: each has ``asked.n`` sequences, which follow one another.
            length: the new tokens that were asked for, and their number without that.
            asked: the sampling parameters. Without a seed one is drawn.
            num_top_logprobs: as in `BatchQueue.submit`.
            stop: strings; a text ends with the token that completes the first of them.
        """
        copies, request.state.began = getattr(asked, "n", 1), time.perf_counter()
        async with AsyncExitStack() as held:
            held.enter_context(self._take_places(len(prompts) * copies, fields[0], copies))
            self._num_new_tokens(fields[1], *length, 0)  # a fault comes before the work
            sequences: list[QueuedSequence] = []
            encoding = asyncio.create_task(
                self._encode(fields[0], prompts, getattr(asked, "prediction", ""))
            )
            watch = asyncio.create_task(_cancel_where_gone(request, encoding, sequences))
            held.callback(encoding.cancel)
            held.callback(watch.cancel)
            held.callback(self._close, sequences)
            await asyncio.wait([encoding])
            encoded = None if encoding.cancelled() else encoding.result()
            if encoded is None or watch.done():
                raise Fault(400, "the client has left")  # which nobody reads
            grammar = await self.constraints.grammar(asked.constraint_field, asked.constraint)
            if watch.done():
                raise Fault(400, "the client has left")
            settings = asked.sampling() | {"ignore_eos": asked.ignore_eos}
            seed = settings.pop("seed")
            seed = random.getrandbits(63) if seed is None else seed
            *encoded, settings["prediction"] = encoded
            repeated = [ids for ids in encoded for _ in range(copies)]
            for ids, own in zip(repeated, sequence_seeds(seed, len(repeated)), strict=True):
                new = self._num_new_tokens(fields[1], *length, len(ids))
                if asked.min_tokens > new:
                    line = f"min_tokens must be at most the {new} new tokens of the answer"
                    raise Fault(400, f"{line}, got {asked.min_tokens}", param="min_tokens")
                settings |= {"max_new_tokens": new, "seed": own}
                settings["cache_salt"] = getattr(asked, "cache_salt", "")
                settings["stop"] = StopCriterion(self.tokenizer, ids, stop) if stop else None
                settings["processors"] = self.constraints.processors(asked, len(ids), grammar)
                sequences.append(self._submit(ids, settings, num_top_logprobs, fields))
            yield sequences

    @contextmanager
    def _take_places(self, count: int, field: str, copies: int) -> Iterator[None]:
        most = self.queue.batch_size + self.limits.max_waiting
        if count > most:
            param = "n" if copies > 1 else field
            line = f"{param} must make at most {most} texts, the places of the server"
            raise Fault(400, f"{line}, got {count}", param=param)
        if self.places + count > most:
            line = f"the server is busy: {self.places} of at most {most} texts are open"
            raise Fault(429, line, code="rate_limit_exceeded")
        self.places += count
        try:
            yield
        finally:
            self.places -= count

    async def _encode(
        self, field: str, prompts: Sequence[Prompt], prediction: str
    ) -> list[list[int]]:
        """The prompts and then the prediction, one after another: others have their turn between.

        A prediction that is none takes no turn.
        """
        encoded = [await self.encoder.encode(field, prompt) for prompt in prompts]
        if not prediction:
            return [*encoded, []]
        return [*encoded, await self.encoder.encode("prediction", Continuation(prediction))]

    def _close(self, sequences: Sequence[QueuedSequence]) -> None:
        for sequence in sequences:
            sequence.cancelled = True
            self.open.pop(id(sequence), None)

    def end_all(self) -> None:
        """Let every text end, also where the round that runs reads a long prompt."""
        self._ends = True
        self.encoder.end_all(_ending())
        for sequence in self.open.values():
            sequence.end()

    def _submit(
        self, prompt: list[int], settings: dict[str, Any], count: int | None,
        fields: tuple[str, str],
    ) -> QueuedSequence:  # fmt: skip
        if self._ends:
            raise _ending()
        try:
            sequence = self.queue.submit(prompt, **settings, num_top_logprobs=count)
        except ValueError as error:
            raise _in_words_of(fields, error) from error
        except RuntimeError as error:  # the queue has ended
            raise _ending() from error
        self.open[id(sequence)] = sequence
        return sequence

    async def pieces(
        self, request: Request, sequences: Sequence[QueuedSequence], stop: Sequence[str] = ()
    ) -> AsyncIterator[tuple[int, Piece]]:
        """What each round appends to each text, by its index, until all texts have ended.

        Args:
            request: whose state counts the tokens.
            sequences: submitted with ``stop``, too.
            stop: strings before which a text is cut that ends with one of them.
        """
        texts = [GrowingText(self.tokenizer, one.input_ids, stop) for one in sequences]
        began, reason = request.state.began, "cancelled"
        counts = [TextMetrics(self.metrics, began, len(one.input_ids)) for one in sequences]
        request.state.num_tokens = 0
        try:
            async with aclosing(_merged(sequences)) as steps:
                async for index, step in steps:
                    piece = texts[index].add(step)
                    counts[index].add(step)
                    request.state.num_tokens += len(piece.step.tokens)
                    yield index, piece
        except GrammarLimitError as error:
            reason = "error"
            raise Fault(400, f"the answer could not be decoded: {error}") from error
        except Exception as error:  # whatever a batch raises
            reason = "error"
            line = f"the text could not be decoded: {type(error).__name__}: {error}"
            raise Fault(500, line) from error
        finally:
            for one in counts:
                one.end(reason)


def _ending() -> Fault:
    return Fault(503, "the server ends")


async def _cancel_where_gone(
    request: Request, encoding: asyncio.Task[Any], sequences: Sequence[QueuedSequence]
) -> None:
    """Cancel what a request waits for as soon as its client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    encoding.cancel()
    for sequence in sequences:
        sequence.cancelled = True


async def _merged(sequences: Sequence[QueuedSequence]) -> AsyncGenerator[tuple[int, Step], None]:
    """The steps of all sequences as they come, with their index; the first error is raised."""
    arrived: asyncio.Queue[tuple[int, Step | Exception | None]] = asyncio.Queue()

    async def read(index: int, sequence: QueuedSequence) -> None:
        last = None
        try:
            async for step in sequence:
                arrived.put_nowait((index, step))
        except Exception as error:
            last = error
        arrived.put_nowait((index, last))

    readers = [asyncio.create_task(read(*one)) for one in enumerate(sequences)]
    try:
        going = len(readers)
        while going:
            index, step = await arrived.get()
            if isinstance(step, Exception):
                raise step
            if step is None:
                going -= 1
            else:
                yield index, step
    finally:
        for reader in readers:
            reader.cancel()


def _in_words_of(fields: tuple[str, str], error: ValueError) -> Fault:
    """An error of the queue, whose arguments have the names of the route."""
    message = str(error)
    names = {"input_ids": fields[0], "max_new_tokens": fields[1]}
    first = re.split(r"\W", message)[0]
    for name, given in names.items():
        message = message.replace(name, given)
    long = first in ("input_ids", "prediction") and "tokens, the model" in message
    long = long and not message.endswith("got 0")
    code = "context_length_exceeded" if long else None
    own = first == "prediction" or first in SamplingFields.model_fields
    param = names.get(first, first if own else None)
    return Fault(400, message, param=param, code=code)
