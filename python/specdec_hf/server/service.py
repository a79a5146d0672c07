"""What the routes share: sequences of the queue, limits, and clients that leave."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from specdec_hf.batch_queue import BatchQueue, QueuedSequence
from specdec_hf.detokenizer import StopCriterion
from specdec_hf.loop.streaming import Step
from specdec_hf.request.sampling import sequence_seeds
from specdec_hf.runner.protocol import context_length
from specdec_hf.server.faults import Fault
from specdec_hf.server.fields import Message, Sampling
from specdec_hf.server.growing_text import GrowingText, Piece


@dataclass(frozen=True)
class Limits:
    """What one request, and all that are open, may ask for.

    Attributes:
        max_waiting: sequences beyond those of a batch; another one gets status 429.
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
        open: sequences that a client still waits for, by their identity.
    """

    def __init__(self, queue: BatchQueue, tokenizer: Any, limits: Limits) -> None:
        self.queue, self.tokenizer, self.limits = queue, tokenizer, limits
        self.open: dict[int, QueuedSequence] = {}
        self._encodes = asyncio.Lock()

    async def encode(
        self, field: str, prompts: Sequence[str | list[int] | list[Message]]
    ) -> list[list[int]]:
        """The token ids of texts, of conversations, or those that were given.

        A text of a megabyte takes seconds, in which other requests are served.
        """
        async with self._encodes:  # a tokenizer may not serve two threads
            return await asyncio.to_thread(lambda: [self._ids(field, one) for one in prompts])

    def _ids(self, field: str, prompt: str | list[int] | list[Message]) -> list[int]:
        try:
            if isinstance(prompt, str):
                return list(self.tokenizer(prompt)["input_ids"])
            if not isinstance(prompt[0], Message):
                return [int(token) for token in prompt]
            turns = [message.turn() for message in prompt]
            roles = [turn["role"] for turn in turns]
            if "tool" in roles:
                self._check_tool_role(f"{field}.{roles.index('tool')}.role")
            template = self.tokenizer.apply_chat_template
            return list(template(turns, add_generation_prompt=True, return_dict=False))
        except Fault:
            raise
        except Exception as error:  # whatever a tokenizer or a chat template raises
            raise Fault(400, f"{field} cannot be encoded: {error}", param=field) from error

    def _check_tool_role(self, field: str) -> None:
        """Refuse the role tool where the chat template would leave it out, or write any role."""
        if not re.search(r"""["']tool["']""", self.tokenizer.get_chat_template()):
            line = "must be a role that the chat template of the model names, got 'tool'"
            raise Fault(400, f"{field} {line}", param=field)

    def num_new_tokens(self, field: str, given: int | None, default: int, prompt: int) -> int:
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
        prompts: Sequence[list[int]],
        max_new_tokens: Sequence[int],
        asked: Sampling,
        num_top_logprobs: int | None = None,
        stop: Sequence[str] = (),
    ) -> AsyncIterator[list[QueuedSequence]]:
        """The sequences of a request; within this its client is watched.

        Args:
            request: whose client may leave.
            fields: names of the prompt and of the length, for messages.
            prompts, max_new_tokens: one for each sequence.
            asked: the sampling parameters. Without a seed one is drawn.
            num_top_logprobs: as in `BatchQueue.submit`.
            stop: strings; a text ends with the token that completes the first of them.
        """
        most = self.queue.batch_size + self.limits.max_waiting
        if len(prompts) > most:
            param = "n" if getattr(asked, "n", 1) > 1 else fields[0]
            line = f"{param} must make at most {most} texts, the places of the server"
            raise Fault(400, f"{line}, got {len(prompts)}", param=param)
        if len(self.open) + len(prompts) > most:
            line = f"the server is busy: {len(self.open)} of at most {most} texts are open"
            raise Fault(429, line, code="rate_limit_exceeded")
        settings = asked.sampling()
        seed = settings.pop("seed")
        seed = random.getrandbits(63) if seed is None else seed
        sequences: list[QueuedSequence] = []
        watch = asyncio.create_task(_cancel_where_gone(request, sequences))
        try:
            seeds = sequence_seeds(seed, len(prompts))
            for prompt, length, own in zip(prompts, max_new_tokens, seeds, strict=True):
                settings |= {"max_new_tokens": length, "seed": own}
                settings["stop"] = StopCriterion(self.tokenizer, prompt, stop) if stop else None
                sequences.append(self._submit(prompt, settings, num_top_logprobs, fields))
            self.open.update((id(sequence), sequence) for sequence in sequences)
            yield sequences
        finally:
            watch.cancel()
            for sequence in sequences:
                sequence.cancelled = True
                self.open.pop(id(sequence), None)

    def end_all(self) -> None:
        """Let every text end, also where the round that runs reads a long prompt."""
        for sequence in self.open.values():
            sequence.end()

    def _submit(
        self, prompt: list[int], settings: dict[str, Any], count: int | None,
        fields: tuple[str, str],
    ) -> QueuedSequence:  # fmt: skip
        try:
            return self.queue.submit(prompt, **settings, num_top_logprobs=count)
        except ValueError as error:
            raise _in_words_of(fields, error) from error
        except RuntimeError as error:  # the queue has ended
            raise Fault(503, "the server ends") from error

    async def pieces(
        self, sequences: Sequence[QueuedSequence], stop: Sequence[str] = ()
    ) -> AsyncIterator[tuple[int, Piece, GrowingText]]:
        """What each round appends to each text, by its index, until all texts have ended.

        Args:
            sequences: submitted with ``stop``, too.
            stop: strings before which a text is cut that ends with one of them.
        """
        texts = [GrowingText(self.tokenizer, one.input_ids, stop) for one in sequences]
        try:
            async with aclosing(_merged(sequences)) as steps:
                async for index, step in steps:
                    yield index, texts[index].add(step), texts[index]
        except Exception as error:  # whatever a batch raises
            line = f"the text could not be decoded: {type(error).__name__}: {error}"
            raise Fault(500, line) from error


async def _cancel_where_gone(request: Request, sequences: Sequence[QueuedSequence]) -> None:
    """Cancel the sequences of a request as soon as its client has gone, also where they wait."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
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
    long = first == "input_ids" and "tokens, the model" in message
    long = long and not message.endswith("got 0")
    code = "context_length_exceeded" if long else None
    param = names.get(first, first if first in Sampling.model_fields else None)
    return Fault(400, message, param=param, code=code)
