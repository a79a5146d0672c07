"""The one reader: from what ``model.generate`` gives a ``custom_generate`` to a `Call`.

Temperature and filters become parameters of the fused ops. All other logits processors and stopping
criteria remain Hugging Face's own objects, called with the prefix of one sequence at a time.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_hf.arguments import PARAMETERS
from specdec_hf.request.call import (
    Call,
    assistant_of,
    num_beams_of,
    read_output_request,
    read_stopping,
)
from specdec_hf.request.inputs import (
    check_decoder_mask,
    inputs_beyond_text,
    mask_on_host,
    read_input_ids,
)
from specdec_hf.request.sampling import make_sampling, sequences_per_prompt
from specdec_hf.request.unsupported import ArgumentSource, refuse_synced_gpus, refuse_unsupported
from specdec_hf.runner.protocol import (
    CACHE_NAME,
    context_length,
    counts_tokens,
    is_encoder_decoder,
    vocab_size_of,
)

# Type of warper -> the sampling parameter that it applies, which is also its attribute.
WARPERS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True)
class Withheld:
    """What ``model.generate`` hands to no ``custom_generate``, as far as it is known.

    Attributes:
        assistant_model, assistant_tokenizer, tokenizer, synced_gpus, prediction: the caller's.
        names: of all that the caller gave.
        fields: of the config, which went around ``model.generate``.
        notes: on the config; None where nobody has checked it.
    """

    assistant_model: Any = None
    assistant_tokenizer: Any = None
    tokenizer: Any = None
    synced_gpus: Any = None
    prediction: Any = None
    names: set[str] = field(default_factory=set)
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] | None = None


def read_call(
    model: Any,
    input_ids: torch.Tensor,
    withheld: Withheld,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> Call:
    """The `Call` of what ``model.generate`` prepared; fields of its config are set here."""
    config, source = generation_config, ArgumentSource(model, withheld.names)
    processors, neutral = _without_warpers(logits_processor, config)
    for name, value in withheld.fields.items():
        setattr(config, name, value)
    notes = refuse_unsupported(config, source) if withheld.notes is None else withheld.notes
    refuse_synced_gpus(model, withheld.synced_gpus)
    output, beams, num_beams = read_output_request(config), None, num_beams_of(config)
    if num_beams > 1:
        from specdec_hf.extras.beam_arguments import read_beams  # noqa: PLC0415  # rarely asked for

        own_config = copy.copy(config)
        own_config.return_dict_in_generate = True
        own_search = partial(
            model._beam_search, input_ids, logits_processor, stopping_criteria, own_config,
            **model_kwargs,
        )  # fmt: skip
        beams = read_beams(config, num_beams, output.num_return_sequences, own_search)
        input_ids, model_kwargs = _first_beams(input_ids, model_kwargs, num_beams)
    inputs = _read_inputs(model, input_ids, inputs_tensor, model_kwargs, config)
    width, batch_size = inputs["input_ids"].shape[1], len(inputs["mask"])
    assistant = assistant_of(
        config, source, withheld.assistant_model, withheld.assistant_tokenizer, withheld.tokenizer,
        _predictions(model, withheld.prediction, batch_size, config),
    )  # fmt: skip
    stopping = read_stopping(stopping_criteria, config, width)
    do_sample = bool(config.do_sample)
    values = {name: getattr(config, name, None) for name in PARAMETERS} | neutral
    try:
        sampling = make_sampling(
            values, do_sample, batch_size, model.device, output.num_return_sequences
        )
    except (TypeError, ValueError) as error:
        name = str(error).split()[0]
        raise type(error)(f"{error}{source.of(name, values.get(name))}") from error
    return Call(
        **inputs,
        stopping=stopping,
        output=output,
        sampling=sampling,
        do_sample=do_sample,
        processors=[
            LogitsProcessorList(_processor_of(one, b, batch_size) for one in processors)
            for b in range(batch_size)
        ],
        beams=beams,
        assistant=assistant,
        notes=notes,
    )


def _predictions(model: Any, given: Any, batch_size: int, config: GenerationConfig) -> list[Any]:
    """``prediction`` for each sequence; empty where there is none."""
    if given is None:
        return []
    from specdec_hf.extras.known_drafts import check_prediction  # noqa: PLC0415  # rarely given

    if num_beams_of(config) > 1:
        raise ValueError(f"prediction must be None with num_beams={config.num_beams}, got one")
    copies = sequences_per_prompt(config)
    return check_prediction(given, batch_size, copies, vocab_size_of(model), context_length(model))


def _read_inputs(
    model: Any,
    input_ids: torch.Tensor,
    inputs_tensor: torch.Tensor | None,
    kwargs: dict[str, Any],
    config: GenerationConfig,
) -> dict[str, Any]:
    """The fields of a `Call` that the inputs of the model decide, by name."""
    made: dict[str, Any] = {}
    past = kwargs.get(CACHE_NAME)
    if past is not None and counts_tokens(past):
        past = past if past.get_seq_length() else None
    elif not getattr(past, "_is_user_defined", False):  # ``model.generate`` marks a caller's
        past = None
    if is_encoder_decoder(model):
        ids = read_input_ids(model, input_ids)
        if config.output_hidden_states:
            raise ValueError("output_hidden_states=True is not supported for encoder-decoders")
        if num_beams_of(config) == 1:
            from specdec_hf.extras.encoder import read_encoder  # noqa: PLC0415  # rare

            read = read_encoder(model, kwargs, inputs_tensor, len(ids))
            made["encoded"], made["encoder"] = read
        mask = check_decoder_mask(ids, kwargs)
    else:
        embeds = kwargs.get("inputs_embeds")
        ids = read_input_ids(model, input_ids, embeds)
        mask = np.ones(tuple((ids if embeds is None else embeds).shape[:2]), dtype=bool)
        if kwargs.get("attention_mask") is not None:
            mask = mask_on_host(kwargs["attention_mask"])
        names = inputs_beyond_text(mask, kwargs)
        if names:
            from specdec_hf.extras.prefill import given_prefill  # noqa: PLC0415  # rarely given

            made["prefill"] = given_prefill(model, input_ids, kwargs, config, names)
    return {"input_ids": ids.numpy(), "mask": mask, "past": past, **made}


def _first_beams(
    input_ids: torch.Tensor, model_kwargs: dict[str, Any], num_beams: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """One row for each prompt of inputs that were repeated for every beam."""
    rows = len(input_ids)
    kwargs = {
        name: value[::num_beams]
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows
        else value
        for name, value in model_kwargs.items()
    }
    return input_ids[::num_beams], kwargs


def _without_warpers(
    processors: LogitsProcessorList, config: GenerationConfig
) -> tuple[list[Any], dict[str, Any]]:
    """The processors but the warpers that Transformers made of the config; the ops apply these.

    A warper that differs from the config is the caller's own and takes the place of the one of the
    config: it stays, and the parameter of the ops takes its neutral value, which is returned.
    """
    kept, values = [], {}
    for one in processors:
        name = WARPERS.get(type(one))
        if name is not None and getattr(one, name) == getattr(config, name):
            continue
        kept.append(one)
        if name is not None:
            values[name] = PARAMETERS[name].neutral
    return kept, values


def _processor_of(processor: Any, b: int, batch_size: int) -> Any:
    """A processor for sequence ``b`` alone, where the given one knows the sequences of a batch.

    Those that read the prompt know each prompt once, though several sequences may continue it.
    """
    if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, torch.Tensor
    ):
        ignored = processor.prompt_ignore_length
        b = b * len(ignored) // batch_size  # there may be several rows, one for each beam
        return RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[b : b + 1])
    if hasattr(processor, "of_one_sequence"):
        return processor.of_one_sequence()
    alone = copy.copy(processor)
    if type(processor) is EncoderRepetitionPenaltyLogitsProcessor:
        b = b * len(processor.encoder_input_ids) // batch_size
        alone.encoder_input_ids = processor.encoder_input_ids[b : b + 1]
    elif type(processor) is EncoderNoRepeatNGramLogitsProcessor:
        b = b * processor.batch_size // batch_size
        alone.batch_size, alone.generated_ngrams = 1, processor.generated_ngrams[b : b + 1]
    elif type(processor) is PrefixConstrainedLogitsProcessor:
        function = processor._prefix_allowed_tokens_fn
        alone._prefix_allowed_tokens_fn = lambda _, ids: function(b, ids)
        alone._num_beams = 1
    else:
        return processor
    return alone
