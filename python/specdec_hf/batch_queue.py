"""Sequences that come one by one, as the requests of a server do, decoded in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specdec_hf.api import SpeculativeDecoder
from specdec_hf.arguments import check_integer, check_integers
from specdec_hf.loop.streaming import Step, TracedRound
from specdec_hf.loop.top_logprobs import add_top_logprobs
from specdec_hf.request.sampling import make_sampling, sequence_seeds
from specdec_hf.runner.protocol import context_length, vocab_size_of

_ENDED = "the BatchQueue has ended; submit within its `async with`"


@dataclass
class QueuedSequence:
    """A sequence of a `BatchQueue`; ``async for`` gives the `Step` of each of its rounds.

    ``finished`` of the last one is "eos"; "length" where the sequence has its max_new_tokens;
    "criteria" where a stop string of the decoder ended it; or "cancelled", also where the queue
    ended first. A last step without a round has no tokens, and its ``sequence`` is -1. Each step is
    given once: another ``async for`` gives those that are not read yet, and ends at once where none
    is left; an error is raised in each.

    Attributes:
        input_ids: its prompt.
        max_new_tokens: most tokens that it gets.
        sampling: its ``seed``, ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
        num_top_logprobs: how many of the likeliest tokens `Step.top_logprobs` lists for each of
            its tokens; None lists nothing.
        cancelled: set it, and the sequence leaves its batch after the round that runs; or, where it
            still waits, is never decoded.
        steps: those that are not read yet, and None or an error behind the last.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: dict[str, Any]
    num_top_logprobs: int | None = None
    cancelled: bool = False
    steps: asyncio.Queue[Step | Exception | None] = field(default_factory=asyncio.Queue)
    _has_last: bool = field(default=False, init=False, repr=False)

    def _put(self, step: Step | Exception) -> None:
        """Append a step, or the error that is the last; nothing follows the last."""
        if not self._has_last:
            self._has_last = isinstance(step, Exception) or bool(step.finished)
            self.steps.put_nowait(step)
            if self._has_last and isinstance(step, Step):
                self.steps.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Step]:
        while isinstance(step := await self.steps.get(), Step):
            yield step
        self.steps.put_nowait(step)  # for those who read on
        if step is not None:
            raise step


class BatchQueue:
    """Decodes in batches the sequences that are submitted one by one.

    Those that wait when a batch ends are the next batch, in the order of their submission. Each has
    its own length, sampling parameters and seed. The model runs in a thread, one batch at a time.
    When the queue ends, its batch ends after the round that runs, for which the end of ``async
    with`` waits, and sequences that still wait raise RuntimeError.

    Args:
        model: a causal language model.
        decoder: rule "match" makes the text of a seed independent of the batch.
        batch_size: most sequences of a batch.

    Raises:
        ValueError, TypeError: batch_size is not an integer of at least 1.

    Example, in a coroutine:
        async with BatchQueue(model, SpeculativeDecoder("prompt_lookup", rule="match")) as queue:
            async for step in queue.submit([5, 6, 7], max_new_tokens=8, seed=1):
                print(step.tokens)
    """

    def __init__(self, model: Any, decoder: SpeculativeDecoder, batch_size: int = 8) -> None:
        self.model, self.decoder = model, decoder
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self._waiting: asyncio.Queue[QueuedSequence | None] = asyncio.Queue()  # None ends it
        self._batch: list[QueuedSequence] = []
        self._ended = False

    async def __aenter__(self) -> BatchQueue:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended = True
        for sequence in self._batch:
            sequence.cancelled = True
        while not self._waiting.empty():
            if waiting := self._waiting.get_nowait():
                waiting._put(_cancelled() if waiting.cancelled else RuntimeError(_ENDED))
        self._waiting.put_nowait(None)
        await asyncio.wait([self._task])  # a cancelled wait does not cancel the task

    def submit(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        seed: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        num_top_logprobs: int | None = None,
    ) -> QueuedSequence:
        """Let a sequence wait for its batch.

        Args:
            input_ids: the prompt, at least one token, each in [0, vocab_size).
            max_new_tokens: at least 1. With the prompt, at most what the model was made for.
            seed, temperature, top_k, top_p, min_p: as in `generate` with ``do_sample=True``.
                Temperature 0 is greedy.
            num_top_logprobs: at least 0, as in `QueuedSequence`.

        Raises:
            ValueError: an argument is out of range.
            TypeError: an argument has a wrong type.
            RuntimeError: the queue has ended.
        """
        if self._ended:
            raise RuntimeError(_ENDED)
        prompt = check_integers("input_ids", input_ids, 0, vocab_size_of(self.model) - 1)
        check_integer("max_new_tokens", max_new_tokens, 1)
        if num_top_logprobs is not None:
            check_integer("num_top_logprobs", num_top_logprobs, 0)
        length = context_length(self.model)
        if length is not None and max_new_tokens >= length:
            rule = f"at most {length - 1}, one less than the model's context length"
            raise ValueError(f"max_new_tokens must be {rule}, got {max_new_tokens}")
        longest = None if length is None else length - max_new_tokens
        if not prompt or (longest is not None and len(prompt) > longest):
            rule = "at least 1 token" if longest is None else f"1 to {longest} tokens"
            raise ValueError(f"input_ids must have {rule}, got {len(prompt)}")
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        # A batch would refuse the values of one of its sequences for all of them.
        listed = {name: [value] for name, value in sampling.items()}
        make_sampling(listed, True, 1, torch.device("cpu"))
        sequence_seeds([seed], 1)
        given = {"seed": seed, **sampling}
        sequence = QueuedSequence(prompt, max_new_tokens, given, num_top_logprobs)
        self._waiting.put_nowait(sequence)
        return sequence

    async def _run(self) -> None:
        while await self._next_batch():
            last: Step | Exception = _cancelled()
            try:
                await asyncio.to_thread(self._decode, asyncio.get_running_loop())
            except Exception as error:
                last = error
            finally:
                for sequence in self._batch:
                    sequence._put(last)

    async def _next_batch(self) -> bool:
        """Wait for the sequences of the next batch; False where the queue has ended."""
        self._batch.clear()
        while not self._batch or (len(self._batch) < self.batch_size and not self._waiting.empty()):
            sequence = await self._waiting.get()
            if sequence is None:
                return False
            if sequence.cancelled:
                sequence._put(_cancelled())
            else:
                self._batch.append(sequence)
        return True

    def _trace(self, traced: TracedRound) -> None:
        wanted = [sequence.num_top_logprobs for sequence in self._batch]
        add_top_logprobs(traced, dict(enumerate(wanted)))
        if self.decoder.trace is not None:
            self.decoder.trace(traced)

    def _decode(self, loop: asyncio.AbstractEventLoop) -> None:
        """Decode the batch, and give each sequence its steps."""
        batch = self._batch
        width = max(len(s.input_ids) for s in batch)
        ids = torch.tensor([(0,) * (width - len(s.input_ids)) + s.input_ids for s in batch])
        mask = torch.arange(width) >= torch.tensor([[width - len(s.input_ids)] for s in batch])

        def ended(input_ids: Tensor, scores: Any) -> Tensor:
            new = input_ids.shape[1] - width
            ends = [s.cancelled or new >= s.max_new_tokens for s in batch]
            return torch.tensor(ends, device=input_ids.device)

        counts = [0] * len(batch)
        sampling = {name: [s.sampling[name] for s in batch] for name in batch[0].sampling}
        for step in self.decoder.stream(
            self.model,
            ids.to(self.model.device),
            attention_mask=mask.long().to(self.model.device),
            max_new_tokens=max(s.max_new_tokens for s in batch),
            do_sample=True,
            stopping_criteria=[ended],
            trace=self._trace,
            **sampling,
        ):
            sequence = batch[step.sequence]
            counts[step.sequence] += len(step.tokens)
            reason = _reason(step.finished, sequence, counts[step.sequence])
            loop.call_soon_threadsafe(sequence._put, replace(step, finished=reason))


def _cancelled() -> Step:
    """The last step of a sequence that has no round to end with."""
    return Step(-1, [], [], [], "cancelled")


def _reason(reason: str, sequence: QueuedSequence, count: int) -> str:
    """Why a sequence of ``count`` new tokens ended, where the batch knows it as "criteria"."""
    if reason == "criteria" and count == sequence.max_new_tokens:
        return "length"
    return "cancelled" if reason == "criteria" and sequence.cancelled else reason
