"""Sequences that come one by one, as the requests of a server do, decoded in batches."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_integer, check_integers, shown
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.extras.continuous_batching import PREFILL_CHUNK_SIZE
from specdec_hf.extras.known_drafts import check_prediction
from specdec_hf.extras.prefix_cache import Prefix, PrefixCache
from specdec_hf.loop.streaming import Step
from specdec_hf.request.entry import prepare_call
from specdec_hf.request.sampling import make_sampling, sequence_seeds
from specdec_hf.runner.protocol import context_length, vocab_size_of
from transformers import LogitsProcessor, LogitsProcessorList

# A batch that sequences join keeps counts of all of them, so after so many another one begins.
MAX_SEQUENCES = 1024
PREFIX_CACHE = 512 * 10**6  # bytes
# What every sequence asks, whatever the generation config of the model says.
COMMON: dict[str, Any] = {"do_sample": True, "return_dict_in_generate": False}
# Fields of a generation config with the only value that a sequence of a batch can have: they need
# a tokenizer, go by the clock, or give several texts. A drafter of the model's own choice would
# take the place of the decoder's.
REFUSED = {
    "stop_strings": None, "max_time": None, "num_beams": 1, "num_return_sequences": 1,
    "prompt_lookup_num_tokens": None, "assistant_early_exit": None,
}  # fmt: skip
_ENDED = "the BatchQueue has ended; submit within its `async with`"
# Whether new tokens [n] of a sequence end it with the last of them.
Stop = Callable[[NDArray[np.int64]], bool]


@dataclass
class QueuedSequence:
    """A sequence of a `BatchQueue`; ``async for`` gives the `Step` of each of its rounds.

    ``finished`` of the last one is "eos"; "length" where the sequence has its max_new_tokens;
    "criteria" where its ``stop`` or a stop string of the decoder ended it; or "cancelled", also
    where the queue ended first. A step of no tokens may be the last. Each step is given once:
    another ``async for`` gives those that are not read yet, and ends at once where none is left; an
    error is raised in each.

    Attributes:
        input_ids: its prompt.
        max_new_tokens: most tokens that it gets.
        sampling: its ``seed``, ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
        num_top_logprobs: how many of the likeliest tokens `Step.top_logprobs` lists for each of
            its tokens; None lists nothing.
        stop, processors, ignore_eos, prediction: as in `BatchQueue.submit`.
        prefix: its salt, and how many tokens of its prompt were not read: 0 before its first step.
        cancelled: set it, and the sequence leaves its batch after the round that runs, or after the
            chunk of its prompt that is read; or, where it still waits, is never decoded.
        steps: those that are not read yet, and None or an error behind the last.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: dict[str, Any]
    num_top_logprobs: int | None = None
    stop: Stop | None = None
    processors: Sequence[LogitsProcessor] = ()
    ignore_eos: bool = False
    prediction: Sequence[int] = ()
    prefix: Prefix = field(default_factory=Prefix)
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

    def end(self) -> None:
        """Cancel it, and let those who read its steps have the last one before its round ends.

        Only the thread of the event loop may call this.
        """
        self.cancelled = True
        self._put(_cancelled())

    async def __aiter__(self) -> AsyncIterator[Step]:
        while isinstance(step := await self.steps.get(), Step):
            yield step
        self.steps.put_nowait(step)  # for those who read on
        if step is not None:
            raise step


class BatchQueue:
    """Decodes in batches the sequences that are submitted one by one.

    The text of a sequence is that of `generate` for its prompt alone. A sequence that waits joins
    the batch between two rounds, in the order of submission, as soon as the batch has fewer than
    ``batch_size`` sequences. Prompts are read one by one, in chunks: they take turns, and the
    sequences that run have a round after each. Where the decoder cannot do that, see docs/loop.md,
    those that wait when a batch ends are the next batch, whose prompts are read at once. The model
    runs in a thread, one batch at a time. A fault of one sequence, such as logits that are not
    finite, is raised for it alone. An error of a round, such as one of a drafter, is raised for all
    that run, and those that wait are the next batch. When the queue ends, its batch ends after the
    round that runs, for which the end of ``async with`` waits, and sequences that still wait raise
    RuntimeError.

    Args:
        model: a causal language model.
        decoder: rule "match" makes the text of a seed independent of the batch.
        batch_size: most sequences of a batch.
        prefill_chunk_size: about how many tokens of prompts are read between two rounds of the
            sequences that run, and in one turn of a prompt.
        prefix_cache: bytes for keys and values of texts that have ended, of which a prompt that
            begins with the same tokens takes those; 0 keeps none.

    Attributes:
        prefix_cache: the `PrefixCache`, whose counts anyone may read.

    Raises:
        ValueError, TypeError: a number is not an integer of at least 1, or 0 for ``prefix_cache``;
            a field of the model's generation config that no sequence of a batch can have, by name.

    Example, in a coroutine:
        async with BatchQueue(model, SpeculativeDecoder("prompt_lookup", rule="match")) as queue:
            async for step in queue.submit([5, 6, 7], max_new_tokens=8, seed=1):
                print(step.tokens)
    """

    def __init__(
        self,
        model: Any,
        decoder: SpeculativeDecoder,
        batch_size: int = 8,
        prefill_chunk_size: int = PREFILL_CHUNK_SIZE,
        prefix_cache: int = PREFIX_CACHE,
    ) -> None:
        self.model, self.decoder = model, decoder
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.prefill_chunk_size = check_integer("prefill_chunk_size", prefill_chunk_size, 1)
        self.prefix_cache = PrefixCache(check_integer("prefix_cache", prefix_cache, 0))
        _check_generation_config(model)
        self._waiting: deque[QueuedSequence] = deque()  # a thread takes from it too
        self._submitted = asyncio.Event()
        self._running: dict[int, QueuedSequence] = {}  # by number in the batch
        self._count = 0  # sequences of the batch so far
        self._ended = False

    async def __aenter__(self) -> BatchQueue:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended = True
        for sequence in list(self._running.values()):
            sequence.cancelled = True
        while (waiting := self._next_waiting()) is not None:
            waiting._put(RuntimeError(_ENDED))
        self._submitted.set()
        await asyncio.wait([self._task])  # a cancelled wait does not cancel the task

    @property
    def num_running(self) -> int:
        """Sequences of the batch that have not ended."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for the batch."""
        return len(self._waiting)

    def warm_up(self) -> None:
        """Decode a short text, so that the first sequence does not pay for what only it would.

        It runs in the thread of the caller, which Ctrl-C interrupts, so call it before the queue is
        opened. A `trace` of the decoder sees its rounds, too.

        Raises:
            ValueError: options of the decoder that do not fit the model.
            RuntimeError: a drafter that a call is using.
        """
        # A rare seed: where it comes again, a drafter that keeps texts copies nothing of this one.
        sampling = {"seed": -(2**63), "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        ids = (0, 1) * 3  # so that drafters which copy have something to copy
        for step in self._stream(QueuedSequence(ids, 4, sampling, 1), lambda running: None):
            if step.error is not None:
                raise step.error

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
        stop: Stop | None = None,
        processors: Sequence[LogitsProcessor] = (),
        ignore_eos: bool = False,
        prediction: Sequence[int] = (),
        cache_salt: str = "",
    ) -> QueuedSequence:
        """Let a sequence wait for its batch.

        Args:
            input_ids: the prompt, at least one token, each in [0, vocab_size).
            max_new_tokens: at least 1. With the prompt, at most what the model was made for.
            seed, temperature, top_k, top_p, min_p: as in `generate` with ``do_sample=True``.
                Temperature 0 is greedy.
            num_top_logprobs: at least 0, as in `QueuedSequence`.
            stop: tells for new tokens [n] of the sequence whether it ends with the last of them, as
                `detokenizer.StopCriterion` does. It is called in the thread of the model, also for
                tokens that are not those of the text in the end, and must depend on nothing else.
            processors: logits processors of this sequence alone, functions of their arguments.
            ignore_eos: whether the sequence goes on behind an end-of-sequence token.
            prediction: token ids of the text that is expected, as in `generate`; at most the
                model's context.
            cache_salt: only sequences of the same salt share keys and values of a prefix.

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
        if stop is not None and not callable(stop):
            raise TypeError(f"stop must be None or a function of token ids, got {shown(stop)}")
        if not isinstance(cache_salt, str):
            raise TypeError(f"cache_salt must be a string, got {shown(cache_salt)}")
        length = context_length(self.model)
        if length is not None and max_new_tokens >= length:
            rule = f"at most {length - 1}, one less than the model's context length"
            raise ValueError(f"max_new_tokens must be {rule}, got {max_new_tokens}")
        longest = None if length is None else length - max_new_tokens
        if not prompt or (longest is not None and len(prompt) > longest):
            rule = "at least 1 token"
            if longest is not None:
                rule = f"1 to {longest} tokens, the model's context of {length} less max_new_tokens"
            raise ValueError(f"input_ids must have {rule}, got {len(prompt)}")
        (ids,) = check_prediction([prediction], 1, 1, vocab_size_of(self.model), length)
        expected = [] if ids is None else ids.tolist()
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        # A batch would refuse the values of one of its sequences for all of them.
        listed = {name: [value] for name, value in sampling.items()}
        make_sampling(listed, True, 1, torch.device("cpu"))
        sequence_seeds([seed], 1)
        given = {"seed": seed, **sampling}
        sequence = QueuedSequence(
            prompt, max_new_tokens, given, num_top_logprobs, stop, processors, ignore_eos, expected,
            Prefix(cache_salt),
        )  # fmt: skip
        self._waiting.append(sequence)
        self._submitted.set()
        return sequence

    async def _run(self) -> None:
        while not self._ended:
            await self._submitted.wait()
            self._submitted.clear()
            while (first := self._join()) is not None:
                last: Step | Exception = _cancelled()
                try:
                    await asyncio.to_thread(self._decode, first)
                except Exception as error:
                    last = error
                finally:
                    for sequence in self._running.values():
                        sequence._put(last)
                    self._running.clear()
                    self._count = 0

    def _next_waiting(self) -> QueuedSequence | None:
        """The first that waits and was not cancelled; its thread may be any."""
        while True:
            try:
                sequence = self._waiting.popleft()
            except IndexError:
                return None
            if not sequence.cancelled:
                return sequence
            self._loop.call_soon_threadsafe(sequence._put, _cancelled())

    def _join(self) -> QueuedSequence | None:
        """Let the next sequence that waits have the next number of the batch."""
        sequence = self._next_waiting()
        if sequence is not None:
            self._running[self._count] = sequence
            self._count += 1
            if self._ended:  # since the others were cancelled
                sequence.cancelled = True
        return sequence

    def _decode(self, first: QueuedSequence) -> None:
        """Decode a batch, which others join, and give each sequence its steps."""

        def source(running: int) -> dict[str, Any] | None:
            full = running >= self.batch_size or self._count >= MAX_SEQUENCES
            sequence = None if full else self._join()
            return None if sequence is None else _arguments(sequence, self.model.device)

        for step in self._stream(first, source):
            sequence = self._running[step.sequence]
            given: list[Step | Exception] = [step]
            if step.error is not None:
                given = [replace(step, finished="", error=None), step.error]
            for one in given:
                self._loop.call_soon_threadsafe(sequence._put, one)
            if step.finished:
                del self._running[step.sequence]

    def _stream(
        self, first: QueuedSequence, source: Callable[[int], dict[str, Any] | None]
    ) -> Iterator[Step]:
        given = _arguments(first, self.model.device)
        return self.decoder.stream(
            self.model, given.pop("input_ids"), **given, source=source,
            prefill_chunk_size=self.prefill_chunk_size, prefix_cache=self.prefix_cache,
        )  # fmt: skip


def _check_generation_config(model: Any) -> None:
    """Refuse what every sequence would be refused for, and what would depend on the others.

    Raises:
        ValueError, TypeError: a field, by name.
    """
    config = getattr(model, "generation_config", None)
    if config is None:  # no model, which its first batch says
        return
    for name, neutral in REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ValueError(
                f"{name}={shown(value)} is not supported in a queue (from model.generation_config)"
            )
    ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with warnings.catch_warnings():  # of minimal lengths, which a text of one token cannot have
        warnings.simplefilter("ignore")
        call = prepare_call(
            model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, **COMMON
        )
    try:
        for processor in call.processors[0]:
            processor(ids, torch.zeros((1, vocab_size_of(model)), device=model.device))
    except Exception as error:  # whatever Transformers raises for an id outside the vocabulary
        name = type(processor).__name__
        raise ValueError(
            f"{name} of model.generation_config cannot be asked: {type(error).__name__}: {error}"
        ) from error


def _arguments(sequence: QueuedSequence, device: torch.device) -> dict[str, Any]:
    """The arguments of a call for this sequence alone."""
    ids = torch.tensor([sequence.input_ids], device=device)
    width, stop = ids.shape[1], sequence.stop

    def ended(input_ids: torch.Tensor, scores: Any) -> bool:
        assert stop is not None
        return stop(input_ids[0, width:].cpu().numpy())

    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": sequence.max_new_tokens,
        "num_top_logprobs": [sequence.num_top_logprobs],
        "cancelled": lambda: sequence.cancelled,
        "prefix": sequence.prefix,
        "stopping_criteria": [] if stop is None else [ended],
        "logits_processor": LogitsProcessorList(sequence.processors),
        **({"eos_token_id": -1} if sequence.ignore_eos else {}),
        "prediction": [sequence.prediction] if len(sequence.prediction) else None,
        **COMMON,
        **sequence.sampling,
    }


def _cancelled() -> Step:
    """The last step of a sequence that has no round to end with."""
    return Step(-1, [], [], [], "cancelled")
