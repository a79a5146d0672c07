"""From what ``model.generate`` hands to a ``custom_generate`` callable to a `Call`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from specdec_hf.hf_arguments.assistant import assistant_of
from specdec_hf.hf_arguments.beams import num_beams_of
from specdec_hf.hf_arguments.call import Call, build_call
from specdec_hf.hf_arguments.encoder import read_encoder
from specdec_hf.hf_arguments.inputs import check_decoder_mask, check_input_ids, mask_on_host
from specdec_hf.hf_arguments.model_inputs import given_prefill, inputs_beyond_text
from specdec_hf.hf_arguments.processors import processor_of, warper_parameter
from specdec_hf.hf_arguments.sampling import PARAMETERS
from specdec_hf.hf_arguments.unsupported import Origin, refuse_kept, refuse_unsupported
from specdec_hf.runner.encoded import is_encoder_decoder


def call_from_hugging_face(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    arguments_kept: dict[str, Any],
    given_per_sequence: dict[str, Any] | None = None,
) -> Call:
    """The same `Call` from what ``model.generate`` hands to a ``custom_generate`` callable.

    ``arguments_kept`` are those that it keeps to itself; see caller.py. ``model_kwargs`` may
    hold ``inputs_tensor``, what the encoder of an encoder-decoder read.
    """
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
    refuse_kept(model, arguments_kept)
    origin = Origin(model, set(arguments_kept.get("kwargs", ())))
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
        names = inputs_beyond_text(model, ids, mask, model_kwargs)
        if names:
            prefill = given_prefill(model, input_ids, model_kwargs, generation_config, names)
    per_sequence = dict(given_per_sequence or {})
    kept = []
    for processor in logits_processor:
        # Warpers that generate() built from the config become parameters of the ops. One that
        # differs from the config is the caller's own: it stays a processor, and the parameter of
        # the ops takes its neutral value.
        parameter = warper_parameter(processor)
        if parameter is None:
            kept.append(processor)
        elif parameter[1] != getattr(generation_config, parameter[0]):
            kept.append(processor)
            per_sequence[parameter[0]] = PARAMETERS[parameter[0]].neutral
    processors = [
        LogitsProcessorList(processor_of(p, b, len(mask)) for p in kept) for b in range(len(mask))
    ]
    asked = ("assistant_model", "assistant_tokenizer", "tokenizer")
    assistant = assistant_of(generation_config, origin, *map(arguments_kept.get, asked))
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() == 0:
        past = None
    return build_call(
        model, ids, mask, generation_config, per_sequence, processors, stopping_criteria, past,
        prefill, origin, assistant, notes, encoded=encoded, encoder=encoder,
        own_search=own_search,
    )  # fmt: skip


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
