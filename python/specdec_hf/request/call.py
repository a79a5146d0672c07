"""A call as the loop needs it, with what its arguments say of beams and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from specdec_hf.arguments import check_integer, shown
from specdec_hf.request.sampling import Sampling, sequences_per_prompt
from specdec_hf.request.unsupported import ArgumentSource
from specdec_hf.schedules.base import DEFAULT_THRESHOLD

if TYPE_CHECKING:
    from specdec_hf.extras.beam_arguments import BeamArguments
    from specdec_hf.extras.encoded import Encoded
    from specdec_hf.extras.encoder import EncoderSource
    from specdec_hf.extras.prefill import Prefill

# Plain generation returns these for every new token.
TOKEN_OUTPUTS = ("scores", "logits", "hidden_states")
# Transformers' own defaults, which no caller asked for.
DEFAULTS = {"num_assistant_tokens": (None, 20), "num_assistant_tokens_schedule": (None, "constant")}


@dataclass
class Assistant:
    """The drafts that the arguments of ``model.generate`` ask for.

    Attributes:
        model: ``assistant_model``, or None.
        tokenizer: ``assistant_tokenizer``, that of a draft model of another vocabulary, or None.
        target_tokenizer: ``tokenizer``, or None.
        lookup: whether ``prompt_lookup_num_tokens`` asks for prompt lookup.
        max_ngram: ``max_matching_ngram_size``, or None.
        num_assistant_tokens: tokens to draft per round, or None.
        schedule: ``num_assistant_tokens_schedule``, or None.
        from_model: whether they are defaults of the model's own generation config, which the
            arguments of the loop overrule.
        confidence_threshold: ``assistant_confidence_threshold``, or None.
        early_exit: ``assistant_early_exit``, after how many layers the target itself drafts, or
            None.
        predictions: [n] int64 each, the ``prediction`` of each sequence, or None; empty where there
            is none.
    """

    model: Any = None
    tokenizer: Any = None
    target_tokenizer: Any = None
    lookup: bool = False
    max_ngram: int | None = None
    num_assistant_tokens: int | None = None
    schedule: str | None = None
    from_model: bool = False
    confidence_threshold: float | None = None
    early_exit: int | None = None
    predictions: Sequence[NDArray[np.int64] | None] = ()


@dataclass(frozen=True)
class Stopping:
    """What ends the sequences of a call.

    Attributes:
        max_new_tokens: most new tokens of each sequence.
        eos: ids that end a sequence.
        pad: id that fills up sequences that ended early.
        criteria: stopping criteria other than length and end-of-sequence.
    """

    max_new_tokens: int
    eos: frozenset[int]
    pad: int
    criteria: StoppingCriteriaList


@dataclass(frozen=True)
class OutputRequest:
    """What the caller wants of a call.

    Attributes:
        return_dict: whether the whole output, and not the tokens alone.
        per_token: which of `TOKEN_OUTPUTS`.
        num_return_sequences: how many sequences that follow one another continue one prompt.
        num_top_logprobs: for each sequence, how many of the likeliest tokens `Step.top_logprobs`
            lists; None lists nothing. Empty where no sequence asks.
    """

    return_dict: bool
    per_token: frozenset[str] = frozenset()
    num_return_sequences: int = 1
    num_top_logprobs: tuple[int | None, ...] = ()


@dataclass
class Call:
    """The arguments of one generate call, which do not change while it runs.

    Attributes:
        input_ids: [B, T] int64 on the host, as given, padding included; T is 0 where the prompt is
            given as ``inputs_embeds`` alone.
        mask: [B, P] bool, columns of the prompt that hold a token; P is T, or the columns of
            ``inputs_embeds``.
        stopping: what ends a sequence.
        output: what the caller wants.
        sampling: parameters of the fused ops.
        do_sample: False is greedy.
        processors: one list per sequence, empty where nothing is to be applied.
        past: the caller's cache, which is never written to, or None.
        prefill: the model's own prefill of inputs other than text, or None.
        encoded: what the decoder of an encoder-decoder reads of its encoder; ``input_ids``,
            ``mask`` and ``past`` are then those of the decoder.
        encoder: what the encoder read, where that is known.
        assistant: the drafts that the arguments of ``model.generate`` ask for.
        beams: arguments of beam search, or None.
        notes: remarks for the statistics.
    """

    input_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    stopping: Stopping
    output: OutputRequest
    sampling: Sampling
    do_sample: bool
    processors: list[LogitsProcessorList]
    past: Any
    beams: BeamArguments | None = None
    prefill: Prefill | None = None
    encoded: Encoded | None = None
    encoder: EncoderSource | None = None
    assistant: Assistant = field(default_factory=Assistant)
    notes: list[str] = field(default_factory=list)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, and not all the likeliest ones."""
        greedy = isinstance(self.sampling.temperature, float) and self.sampling.temperature == 0
        return self.do_sample and not greedy

    @property
    def prompt_ids(self) -> NDArray[np.int64]:
        """[B, P], the ids of the prompt's columns; 0 where only their embeddings are known."""
        if self.input_ids.shape == self.mask.shape:
            return self.input_ids
        return np.zeros(self.mask.shape, dtype=np.int64)


def read_stopping(criteria: StoppingCriteriaList, config: GenerationConfig, width: int) -> Stopping:
    """What ends sequences of ``width`` columns; raises ValueError where these are too many."""
    max_length = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
    ends = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is EosTokenCriteria]
    known = (MaxLengthCriteria, EosTokenCriteria)
    others = StoppingCriteriaList(c for c in criteria if type(c) not in known)
    if width >= max_length:
        raise ValueError(
            f"input_ids has {width} columns, but generation is limited to {max_length}"
        )
    pad: Any = config._pad_token_tensor
    eos = frozenset(id for ids in ends for id in ids)
    return Stopping(max_length - width, eos, int(pad) if pad is not None else 0, others)


def read_output_request(config: GenerationConfig) -> OutputRequest:
    """What a complete config asks for; raises TypeError or ValueError for a wrong number."""
    return_dict = bool(config.return_dict_in_generate)
    asked = [x for x in TOKEN_OUTPUTS if return_dict and getattr(config, f"output_{x}")]
    return OutputRequest(return_dict, frozenset(asked), sequences_per_prompt(config))


def num_beams_of(config: GenerationConfig) -> int:
    """``num_beams``, checked; None is 1.

    Raises:
        TypeError: not an int.
        ValueError: below 1.
    """
    value: Any = 1 if config.num_beams is None else config.num_beams
    return check_integer("num_beams", value, 1)


def assistant_of(
    config: GenerationConfig,
    origin: ArgumentSource,
    model: Any = None,
    tokenizer: Any = None,
    target_tokenizer: Any = None,
    predictions: Sequence[NDArray[np.int64] | None] = (),
) -> Assistant:
    """Read a complete generation config.

    Args:
        config: the config of the call.
        origin: where its values come from.
        model: ``assistant_model``.
        tokenizer: ``assistant_tokenizer``.
        target_tokenizer: ``tokenizer``.
        predictions: checked.

    Raises:
        TypeError: an assistant model that is no model.
        ValueError: two of an assistant model, prompt lookup and an early exit.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"assistant_model must be a model, got {shown(model)}")
    wanted = {
        name: None if getattr(config, name, None) in default else getattr(config, name)
        for name, default in DEFAULTS.items()
    }
    lookup = config.prompt_lookup_num_tokens
    early_exit = config.assistant_early_exit
    asked = {
        "assistant_model": model, "prompt_lookup_num_tokens": lookup,
        "assistant_early_exit": early_exit,
    }  # fmt: skip
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} must not both be given")
    schedule = wanted["num_assistant_tokens_schedule"]
    number = wanted["num_assistant_tokens"]
    return Assistant(
        model=model,
        tokenizer=tokenizer,
        target_tokenizer=target_tokenizer,
        lookup=lookup is not None,
        max_ngram=config.max_matching_ngram_size,
        num_assistant_tokens=number if lookup is None else lookup,
        schedule=schedule,
        from_model=lookup is None and bool(origin.of("num_assistant_tokens", number)),
        confidence_threshold=_confidence_threshold(config, origin),
        early_exit=early_exit,
        predictions=predictions,
    )


def _confidence_threshold(config: GenerationConfig, origin: ArgumentSource) -> float | None:
    """Transformers' default of 0.4 counts only where the call itself gives it; 0 asks for none."""
    value = getattr(config, "assistant_confidence_threshold", None)
    if value == DEFAULT_THRESHOLD and "assistant_confidence_threshold" not in origin.names:
        return None
    return value or None
