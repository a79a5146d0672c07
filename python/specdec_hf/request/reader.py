"""The one reader: from what ``model.generate`` gives a ``custom_generate`` to a `Call`.

Temperature and filters become parameters of the fused ops. All other logits processors and stopping
criteria remain Hugging Face's own objects, called with the prefix of one sequence at a time.
"""

from __future__ import annotations

import copy
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
    TOKEN_OUTPUTS,
    Call,
    assistant_of,
    beam_arguments,
    num_beams_of,
    read_criteria,
)
from specdec_hf.request.encoder import read_encoder
from specdec_hf.request.inputs import check_decoder_mask, check_input_ids, mask_on_host
from specdec_hf.request.prefill import given_prefill, inputs_beyond_text
from specdec_hf.request.sampling import make_sampling, sequences_per_prompt
from specdec_hf.request.unsupported import Origin, refuse_kept, refuse_unsupported
from specdec_hf.runner.encoded import counts_tokens, is_encoder_decoder
from specdec_hf.runner.protocol import CACHE_NAME

# Type of warper -> the sampling parameter that it applies, which is also its attribute.
WARPERS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


def read_call(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    others: dict[str, Any],
    sampling: dict[str, Any] | None = None,
) -> Call:
    """The `Call` of a ``custom_generate``.

    Args:
        model: the model.
        input_ids, logits_processor, stopping_criteria, generation_config: prepared by
            ``model.generate``.
        model_kwargs: the model's inputs, and ``inputs_tensor``, what the encoder of an
            encoder-decoder read.
        others: arguments that ``model.generate`` keeps to itself, and ``kwargs``, the names of
            those in the config that the caller gave.
        sampling: `PARAMETERS` of the call; None are those of the config.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: an argument that is unsupported or out of range, by name.
    """
    model_kwargs = dict(model_kwargs)
    inputs_tensor = model_kwargs.pop("inputs_tensor", None)
    of_decoder = is_encoder_decoder(model)
    num_beams = num_beams_of(generation_config)
    own_search = None
    if num_beams > 1:
        config = copy.copy(generation_config)
        config.return_dict_in_generate = True
        own_search = partial(
            model._beam_search, input_ids, logits_processor, stopping_criteria, config,
            **model_kwargs,
        )  # fmt: skip
        input_ids, model_kwargs = _first_beams(input_ids, model_kwargs, num_beams)
    embeds = None if of_decoder else model_kwargs.get("inputs_embeds")
    ids = check_input_ids(model, input_ids, embeds)
    refuse_kept(model, others)
    origin = Origin(model, set(others.get("kwargs", ())))
    notes = refuse_unsupported(generation_config, origin)
    mask = np.ones(tuple((ids if embeds is None else embeds).shape[:2]), dtype=bool)
    encoded = encoder = prefill = None
    if of_decoder:
        if generation_config.output_hidden_states:
            raise ValueError("output_hidden_states=True is not supported for encoder-decoders")
        if num_beams == 1:
            encoded, encoder = read_encoder(model, model_kwargs, inputs_tensor, len(ids))
        mask = check_decoder_mask(ids, model_kwargs)
    else:
        if model_kwargs.get("attention_mask") is not None:
            mask = mask_on_host(model_kwargs["attention_mask"])
        names = inputs_beyond_text(mask, model_kwargs)
        if names:
            prefill = given_prefill(model, input_ids, model_kwargs, generation_config, names)
    sampling = sampling or {name: getattr(generation_config, name, None) for name in PARAMETERS}
    processors, values = _without_warpers(logits_processor, generation_config)
    asked = ("assistant_model", "assistant_tokenizer", "tokenizer")
    past = model_kwargs.get(CACHE_NAME)
    if past is not None and counts_tokens(past):
        past = past if past.get_seq_length() else None
    elif not getattr(past, "_is_user_defined", False):  # ``model.generate`` marks a caller's
        past = None
    assistant = assistant_of(generation_config, origin, *map(others.get, asked))
    max_length, eos, criteria = read_criteria(stopping_criteria)
    if ids.shape[1] >= max_length:
        raise ValueError(
            f"input_ids has {ids.shape[1]} columns, but generation is limited to {max_length}"
        )
    do_sample, pad = bool(generation_config.do_sample), generation_config._pad_token_tensor
    returned = sequences_per_prompt(generation_config)
    beams = beam_arguments(generation_config, num_beams, returned)
    given = sampling | values
    try:
        parameters = make_sampling(given, do_sample, len(mask), model.device, returned)
    except (TypeError, ValueError) as error:
        name = str(error).split()[0]
        raise type(error)(f"{error}{origin.of(name, given.get(name))}") from error
    return_dict = bool(generation_config.return_dict_in_generate)
    wanted = [x for x in TOKEN_OUTPUTS if return_dict and getattr(generation_config, f"output_{x}")]
    return Call(
        input_ids=ids.numpy(),
        mask=mask,
        max_new_tokens=max_length - ids.shape[1],
        eos=eos,
        pad=int(pad) if pad is not None else 0,
        sampling=parameters,
        do_sample=do_sample,
        processors=[
            LogitsProcessorList(_processor_of(one, b, len(mask)) for one in processors)
            for b in range(len(mask))
        ],
        criteria=criteria,
        past=past,
        return_dict=return_dict,
        outputs=frozenset(wanted),
        beams=beams,
        own_search=own_search,
        num_return_sequences=returned,
        prefill=prefill,
        encoded=encoded,
        encoder=encoder,
        assistant=assistant,
        notes=notes,
    )


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
        return RepetitionPenaltyLogitsProcessor(
            processor.penalty, prompt_ignore_length=ignored[b : b + 1]
        )
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
