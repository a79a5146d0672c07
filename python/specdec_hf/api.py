"""The decoding loop behind Hugging Face's argument names.

`generate` is the whole of it. `SpeculativeDecoder` is the same as an object, for
``model.generate(custom_generate=...)`` and for streaming step by step.

This module is not called ``generate`` because importing a submodule of that name would put the
module in the place of the lazily loaded function ``specdec_hf.generate``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from specdec_hf import plugins
from specdec_hf.arguments import check_integer, check_sequence, shown
from specdec_hf.drafting.registry import AUTO
from specdec_hf.loop.begin import begin
from specdec_hf.loop.output import SpecOutput, finish
from specdec_hf.loop.rounds import step
from specdec_hf.loop.session import Session
from specdec_hf.loop.streaming import Step, Streamer, put_step
from specdec_hf.options import Options, with_texts
from specdec_hf.request.call import Call
from specdec_hf.request.entry import (
    add_stop_strings,
    has_own_generate,
    prepare_call,
    rename_cache,
)
from specdec_hf.request.inputs import check_language_model, one_of
from specdec_hf.request.reader import Withheld, read_call
from specdec_hf.runner.forwards import compiles_on
from specdec_hf.runner.protocol import is_encoder_decoder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn import Module

    from specdec_hf.drafting.drafter import Drafter
    from specdec_hf.loop.streaming import Trace
    from specdec_hf.schedules.base import Schedule
    from specdec_hf.schedules.benefit_guard import BenefitGuard
    from specdec_hf.trees import EagleTree, TreeSpec, TrieTree


@with_texts
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    drafter: str | os.PathLike[str] | Module | Drafter | Sequence[Any] | None = AUTO,
    num_assistant_tokens: int | None = None,
    num_assistant_tokens_schedule: str | Schedule | None = None,
    rule: str | Callable[..., Any] = "auto",
    lenience: float | None = None,
    typical_epsilon: float | None = None,
    typical_delta: float | None = None,
    top_beta_rank: int | None = None,
    top_beta_distance: float | None = None,
    ablate: str | None = None,
    tree: TreeSpec | EagleTree | TrieTree | Sequence[int] | None = None,
    seed: int | Sequence[int] | NDArray[Any] | Tensor | None = None,
    guard: bool | BenefitGuard | None = None,
    compile: bool | None = None,
    gamma: int | None = None,
    num_speculative_tokens: int | None = None,
    num_assistant_beams: int | None = None,
    cache: str = "auto",
    self_check: bool = True,
    streamer: Streamer | None = None,
    trace: Trace | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **kwargs: Any,
) -> Any:
    """Generate text speculatively with the unmodified ``model``, without loss.

    The named arguments are the options of the loop, which docs/loop.md#all-options describes. All
    others are those of ``model.generate`` and mean the same: ``attention_mask``,
    ``max_new_tokens``, ``max_length``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``,
    ``min_p`` (scalar, or one per sequence), ``logits_processor``, ``stopping_criteria``,
    ``stop_strings`` with ``tokenizer``, ``assistant_tokenizer`` with ``tokenizer`` (a drafter with
    another vocabulary), ``tokenizer`` alone (to check what drafters read from files),
    ``eos_token_id``, ``pad_token_id``, ``past_key_values``,
    ``generation_config``, ``return_dict_in_generate``, penalties. Defaults come from
    ``model.generation_config``. Processors and criteria are called for one sequence at a time, also
    for prefixes that end in a draft which is then rejected. They must therefore be functions of
    their arguments; a processor that is not is refused where that shows.

    Args:
        model: causal LM or encoder-decoder, left on its device and in its dtype.
        inputs: alias of ``input_ids``, as in ``model.generate``, or what the encoder reads.
        input_ids: [B, T] int64 prompts, padded on the left; of an encoder-decoder the encoder's,
            padded on any side.

    Returns:
        [B, W] int64 token ids, or `SpecOutput` with ``return_dict_in_generate=True``.

    Raises:
        OSError: a file of a drafter that cannot be read.
        TypeError: an argument of a wrong type, by name.
        ValueError: an argument unknown, unsupported or out of range, by name; a processor that
            answers otherwise when it is asked again.
        RuntimeError: logits that are not finite, by sequence and position.
    """
    given = locals()
    given = {option.name: given[option.name] for option in fields(Options)}
    check_language_model("model", model)
    _check_stop_strings(kwargs.get("stop_strings"), kwargs.get("tokenizer"))
    if isinstance(cache, Cache):  # that of Transformers
        kwargs["cache"] = given.pop("cache")
    rename_cache(kwargs)
    options = Options(**given)
    if has_own_generate(model):
        from specdec_hf.extras.own_generate import by_own_generate  # noqa: PLC0415  # rare

        prompts = {"inputs": inputs, "input_ids": input_ids}
        if not is_encoder_decoder(model):
            prompts = {"input_ids": one_of(inputs, input_ids)}
        return by_own_generate(model, prompts, partial(_decode, options=options), seed, kwargs)
    return _decode(model, prepare_call(model, input_ids, inputs=inputs, **kwargs), options)


# eq=False and repr=False because a field may hold a model.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SpeculativeDecoder(Options):
    """The loop as an object: ``model.generate(**inputs, custom_generate=SpeculativeDecoder(...))``.

    ``model.generate`` keeps some of its arguments to itself when it calls a ``custom_generate``.
    This object takes ``streamer``, ``tokenizer`` and ``stop_strings`` in their place, and as
    ``drafter`` an ``assistant_model``, or an `OtherVocabularyDrafter` of one with an
    ``assistant_tokenizer``. ``negative_prompt_ids`` and ``synced_gpus`` have no effect there;
    docs/transformers.md lists all. The other arguments stay with ``model.generate``.

    Args:
        tokenizer, stop_strings: end sequences at these strings. Drafters that read a file are
            checked with the tokenizer.

    All others are those of `generate`.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    stop_strings: str | list[str] | None = None

    def __post_init__(self) -> None:
        _check_stop_strings(self.stop_strings, self.tokenizer)
        super().__post_init__()

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        seed: Any = None,
        inputs_tensor: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by ``model.generate``; same result as `generate`.

        ``model.generate(custom_generate=..., seed=...)`` hands ``seed`` over because it is named in
        this signature. None means the ``seed`` of this object. ``inputs_tensor`` is what the
        encoder of an encoder-decoder read, which Transformers hands over in the same way.
        """
        prepared = {
            "logits_processor": logits_processor, "stopping_criteria": stopping_criteria,
            "generation_config": generation_config, "inputs_tensor": inputs_tensor,
        }  # fmt: skip
        if self.stop_strings is not None:
            add_stop_strings(prepared, self.tokenizer, self.stop_strings)
        withheld = Withheld(tokenizer=self.tokenizer)
        call = read_call(model, input_ids, withheld, **prepared, **model_kwargs)
        return _decode(model, call, self, seed)

    def stream(
        self,
        model: Any,
        input_ids: torch.Tensor | None = None,
        *,
        seed: Any = None,
        source: Any = None,
        prefill_chunk_size: Any = None,
        num_top_logprobs: Any = None,
        cancelled: Any = None,
        **kwargs: Any,
    ) -> Generator[Step, None, SpecOutput]:
        """Yield a `Step` per sequence and round; the generator returns a `SpecOutput`.

        Args:
            model, input_ids, kwargs: as in `generate`.
            seed: of this call; None means that of this object.
            source: gives sequences that join the batch between two rounds. It is called with the
                number of those that run or are read, until it returns None. It returns the
                arguments of one sequence: ``input_ids`` [1, T], ``seed``, ``cancelled``, and what
                else `stream` takes of the model's ``generate``. Such a sequence has the next
                number, B and up, in `Step.sequence` and in the statistics, and the output holds the
                statistics alone. A batch that no sequence can join calls it before its first round
                alone, and a note says why; see docs/loop.md#continuous-batching.
            prefill_chunk_size: with ``source``, about how many tokens of their prompts are read
                between two rounds of the others, at least 1; None is 256. Without, it is an
                argument of the model's ``generate``.
            num_top_logprobs: for each sequence, how many of the likeliest tokens
                `Step.top_logprobs` lists, at least 0, or None, which lists nothing.
            cancelled: with ``source``, called before each chunk of the prompt and before each
                round; the sequence ends where it returns True.

        Raises:
            ValueError: this object has a streamer, which would get nothing; a sequence that cannot
                join the batch; an argument out of range.
        """
        if self.streamer is not None:
            raise ValueError(
                "streamer must be None with stream, which yields the text, got "
                f"{shown(self.streamer)}"
            )
        check_language_model("model", model)
        chunk = prefill_chunk_size
        if source is None and chunk is not None:
            kwargs["prefill_chunk_size"] = chunk
        elif chunk is not None:
            chunk = check_integer("prefill_chunk_size", chunk, 1)
        call = self._prepare(model, input_ids, num_top_logprobs, **kwargs)
        if source is not None:
            seed = self.seed if seed is None else seed
            return (yield from self._joined(model, (call, seed, cancelled), source, chunk))
        session = begin(model, call, self, seed)
        try:
            while not session.done:
                yield from step(session)
            return finish(session)
        finally:
            session.borrower.held = False

    def _prepare(
        self,
        model: Any,
        input_ids: torch.Tensor | None = None,
        num_top_logprobs: Any = None,
        **kwargs: Any,
    ) -> Call:
        """The call of `stream`."""
        for name in ("tokenizer", "stop_strings"):
            if getattr(self, name) is not None:
                kwargs.setdefault(name, getattr(self, name))
        _check_stop_strings(kwargs.get("stop_strings"), kwargs.get("tokenizer"))
        rename_cache(kwargs)
        call = prepare_call(model, input_ids, **kwargs)
        if call.beams is not None:
            raise ValueError(
                f"num_beams must be 1 with stream, got {call.beams.num_beams}: which beam is best "
                "is known at the end"
            )
        if num_top_logprobs is not None:
            counts = _checked_counts(num_top_logprobs, len(call.mask))
            call = replace(call, output=replace(call.output, num_top_logprobs=counts))
        return call

    def _joined(
        self,
        model: Any,
        first: tuple[Call, Any, Callable[[], bool] | None],
        source: Callable[[int], dict[str, Any] | None],
        chunk: int | None,
    ) -> Generator[Step, None, SpecOutput]:
        """The rounds of a batch that sequences of ``source`` join; see `stream`.

        Args:
            first: the call that the batch begins with, its seeds, and whether it was given up.
        """
        from specdec_hf.extras.continuous_batching import Asked, run_continuous  # noqa: PLC0415  # for servers

        def asked(call: Call, seed: Any, cancelled: Callable[[], bool] | None) -> Asked:
            return Asked(call, model.device, seed, cancelled or _never)

        def next_call(running: int) -> Asked | None:
            given = source(running)
            if given is None:
                return None
            given = dict(given)
            seed, cancelled = given.pop("seed", self.seed), given.pop("cancelled", None)
            return asked(self._prepare(model, **given), seed, cancelled)

        stats = yield from run_continuous(
            model, lambda call, seeds: begin(model, call, self, seeds),
            asked(*first), next_call, chunk,
            records_graphs=bool(self.compile) and compiles_on(model.device),
        )  # fmt: skip
        return SpecOutput(stats=stats)


def _never() -> bool:
    return False


def run(session: Session, streamer: Streamer | None = None) -> Any:
    """Run all rounds of a session; returns its output."""
    try:
        while not session.done:
            for appended in step(session):
                put_step(streamer, appended)
        if streamer is not None:
            streamer.end()
        output = finish(session)
    finally:
        session.borrower.held = False
    return output if session.call.output.return_dict else output.sequences


def _decode(model: Any, call: Call, options: Options, seed: Any = None) -> Any:
    """The output of a call: the rounds of a session, or of a beam search."""
    if options.streamer is not None:
        _check_one_text(call)
        options.streamer.put(torch.from_numpy(call.input_ids))
    if call.beams is None:
        output = run(begin(model, call, options, seed), options.streamer)
    else:
        output = plugins.load("beam_search")(model, call, options)
        output = output if call.output.return_dict else output.sequences
    if call.output.return_dict and is_encoder_decoder(model) and has_own_generate(model):
        from specdec_hf.extras.own_generate import plain_output  # noqa: PLC0415  # rare

        return plain_output(output)
    return output


def _check_one_text(call: Call) -> None:
    """Raises ValueError for a call of several texts, which no streamer can tell apart."""
    batch_size = len(call.mask)
    if call.beams is not None:
        raise ValueError(f"streamer must be None with num_beams={call.beams.num_beams}")
    if batch_size != 1:
        raise ValueError(
            f"streamer needs batch size 1, got {batch_size}; use SpeculativeDecoder(...).stream"
        )


def _checked_counts(given: Any, batch_size: int) -> tuple[int | None, ...]:
    """``num_top_logprobs`` of `SpeculativeDecoder.stream`, checked."""
    name = "num_top_logprobs"
    counts = check_sequence(name, given)
    if len(counts) != batch_size:
        raise ValueError(f"{name} must have {batch_size} values, got {len(counts)}")
    return tuple(one if one is None else check_integer(name, one, 0) for one in counts)


def _check_stop_strings(stop_strings: Any, tokenizer: Any) -> None:
    """Raises TypeError for a wrong type, and ValueError for stop strings without a tokenizer."""
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer must be None or a tokenizer of Transformers, got {shown(tokenizer)}"
        )
    if stop_strings is None:
        return
    listed = stop_strings if isinstance(stop_strings, list | tuple) else [stop_strings]
    for one in listed:
        if not isinstance(one, str):
            raise TypeError(f"stop_strings must be a string or a list of them, got {shown(one)}")
    if tokenizer is None:
        raise ValueError(
            f"stop_strings must come with a tokenizer, got {shown(stop_strings)} alone"
        )
