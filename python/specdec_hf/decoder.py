"""The loop as an object, for ``model.generate(custom_generate=...)`` and for streaming."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdec_hf.api import check_stop_strings, decode
from specdec_hf.arguments import check_integer, check_sequence, shown
from specdec_hf.loop.begin import begin
from specdec_hf.loop.output import SpecOutput
from specdec_hf.loop.rounds import rounds
from specdec_hf.loop.streaming import Step
from specdec_hf.options import Options
from specdec_hf.request.call import Call
from specdec_hf.request.entry import add_stop_strings, prepare_call, rename_cache
from specdec_hf.request.inputs import check_language_model
from specdec_hf.request.reader import Withheld, read_call
from specdec_hf.runner.forwards import compiles_on


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
        check_stop_strings(self.stop_strings, self.tokenizer)
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
        prediction: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by ``model.generate``; same result as `generate`.

        ``model.generate(custom_generate=..., seed=...)`` hands ``seed`` over because it is named in
        this signature, and ``prediction`` likewise. None means the ``seed`` of this object.
        ``inputs_tensor`` is what the encoder of an encoder-decoder read.
        """
        prepared = {
            "logits_processor": logits_processor, "stopping_criteria": stopping_criteria,
            "generation_config": generation_config, "inputs_tensor": inputs_tensor,
        }  # fmt: skip
        if self.stop_strings is not None:
            add_stop_strings(prepared, self.tokenizer, self.stop_strings)
        withheld = Withheld(tokenizer=self.tokenizer, prediction=prediction)
        call = read_call(model, input_ids, withheld, **prepared, **model_kwargs)
        return decode(model, call, self, seed)

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
        prefix: Any = None,
        prefix_cache: Any = None,
        **kwargs: Any,
    ) -> Generator[Step, None, SpecOutput]:
        """Yield a `Step` per sequence and round; the generator returns a `SpecOutput`.

        Args:
            model, input_ids, kwargs: as in `generate`.
            seed: of this call; None means that of this object.
            source: gives sequences that join the batch between two rounds. It is called with the
                number of those that run or are read, until it returns None. It returns the
                arguments of one sequence: ``input_ids`` [1, T], ``seed``, ``cancelled``,
                ``prefix``, and what else `stream` takes of the model's ``generate``. Such a
                sequence has the next number, B and up, in `Step.sequence` and in the statistics,
                and the output holds the statistics alone. A batch that no sequence can join calls
                it before its first round alone, and a note says why; see
                docs/loop.md#continuous-batching.
            prefill_chunk_size: with ``source``, about how many tokens of their prompts are read
                between two rounds of the others, at least 1; None is 256. Without, it is an
                argument of the model's ``generate``.
            num_top_logprobs: for each sequence, how many of the likeliest tokens
                `Step.top_logprobs` lists, at least 0, or None, which lists nothing.
            cancelled: with ``source``, called before each chunk of the prompt and before each
                round; the sequence ends where it returns True.
            prefix, prefix_cache: with ``source``, a `Prefix` and a `PrefixCache` of
                specdec_hf.extras.prefix_cache; see docs/loop.md#chunked-prefill.

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
        if source is None:
            _check_none(prefix=prefix, prefix_cache=prefix_cache)
        if source is None and chunk is not None:
            kwargs["prefill_chunk_size"] = chunk
        elif chunk is not None:
            chunk = check_integer("prefill_chunk_size", chunk, 1)
        call = self._prepare(model, input_ids, num_top_logprobs, **kwargs)
        if source is not None:
            seed = self.seed if seed is None else seed
            first = call, seed, cancelled, prefix
            return (yield from self._joined(model, first, source, chunk, prefix_cache))
        return (yield from rounds(begin(model, call, self, seed)))

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
        check_stop_strings(kwargs.get("stop_strings"), kwargs.get("tokenizer"))
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
        first: tuple[Call, Any, Callable[[], bool] | None, Any],
        source: Callable[[int], dict[str, Any] | None],
        chunk: int | None,
        prefix_cache: Any,
    ) -> Generator[Step, None, SpecOutput]:
        """The rounds of a batch that sequences of ``source`` join; see `stream`.

        Args:
            first: the call that the batch begins with, its seeds, whether it was given up, and its
                prefix.
        """
        from specdec_hf.extras.continuous_batching import Asked, run_continuous  # noqa: PLC0415  # for servers
        from specdec_hf.extras.prefix_cache import Prefix  # noqa: PLC0415  # the same

        def asked(call: Call, seed: Any, cancelled: Any, prefix: Any) -> Asked:
            return Asked(call, model.device, seed, cancelled or _never, prefix or Prefix())

        def next_call(running: int) -> Asked | None:
            given = source(running)
            if given is None:
                return None
            given = dict(given)
            seed, cancelled = given.pop("seed", self.seed), given.pop("cancelled", None)
            prefix = given.pop("prefix", None)
            return asked(self._prepare(model, **given), seed, cancelled, prefix)

        stats = yield from run_continuous(
            model, lambda call, seeds: begin(model, call, self, seeds),
            asked(*first), next_call, chunk, prefix_cache=prefix_cache,
            records_graphs=bool(self.compile) and compiles_on(model.device),
        )  # fmt: skip
        return SpecOutput(stats=stats)


def _check_none(**given: Any) -> None:
    """Refuse what only sequences that join have."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} must be None without a source, got {shown(value)}")


def _never() -> bool:
    return False


def _checked_counts(given: Any, batch_size: int) -> tuple[int | None, ...]:
    """``num_top_logprobs`` of `SpeculativeDecoder.stream`, checked."""
    name = "num_top_logprobs"
    counts = check_sequence(name, given)
    if len(counts) != batch_size:
        raise ValueError(f"{name} must have {batch_size} values, got {len(counts)}")
    return tuple(one if one is None else check_integer(name, one, 0) for one in counts)
