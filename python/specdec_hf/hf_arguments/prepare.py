"""From the arguments of `specdec_hf.generate`, which are Hugging Face's, to a `Call`.

Temperature and filters become parameters of the fused ops. All other logits processors and stopping
criteria remain Hugging Face's own objects, called with the prefix of one sequence at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specdec_hf.hf_arguments.assistant import assistant_of
from specdec_hf.hf_arguments.beams import num_beams_of
from specdec_hf.hf_arguments.call import Call, build_call
from specdec_hf.hf_arguments.custom_generate import call_from_hugging_face
from specdec_hf.hf_arguments.encoder import by_generate
from specdec_hf.hf_arguments.inputs import (
    check_input_ids,
    check_mask,
    check_tensor,
    class_generate,
    has_own_generate,
    one_of,
)
from specdec_hf.hf_arguments.model_inputs import (
    check_extra_inputs,
    inputs_beyond_text,
    prepare_prefill,
)
from specdec_hf.hf_arguments.processors import allowed_tokens_of
from specdec_hf.hf_arguments.sampling import PARAMETERS, is_per_sequence, sequences_per_prompt
from specdec_hf.hf_arguments.unsupported import (
    Origin,
    check_types,
    refuse_kept,
    refuse_unsupported,
)
from specdec_hf.runner.encoded import is_encoder_decoder


def prepare_call(
    model: Any,
    input_ids: torch.Tensor | None,
    *,
    inputs: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    prefix_allowed_tokens_fn: Any = None,
    tokenizer: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Call:
    """Read Hugging Face arguments as ``model.generate`` would, without changing any of them.

    Raises:
        TypeError: an argument that should be a number and is none, by name.
        ValueError: an argument that is unknown, unsupported or out of range, by name.
    """
    if has_own_generate(model):
        raise ValueError(
            f"{type(model).__name__} has a generate method of its own: pass custom_generate to it"
        )
    check_types(kwargs, generation_config, getattr(model, "generation_config", None))
    if is_encoder_decoder(model):
        return _encoder_decoder_call(
            model, inputs=inputs, input_ids=input_ids, attention_mask=attention_mask,
            generation_config=generation_config, logits_processor=logits_processor,
            stopping_criteria=stopping_criteria, prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            tokenizer=tokenizer, past_key_values=past_key_values, **kwargs,
        )  # fmt: skip
    input_ids = one_of(inputs, input_ids)
    embeds = kwargs.get("inputs_embeds")
    ids = check_input_ids(model, input_ids, embeds)
    batch_size, columns = ids.shape
    per_sequence = _pop_per_sequence(kwargs)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    refuse_kept(model, kwargs)
    assistant_model = kwargs.pop("assistant_model", None)
    assistant_tokenizer = kwargs.pop("assistant_tokenizer", None)
    kwargs.pop("trust_remote_code", None)
    has_default_max_length = (
        all(
            getattr(config, "max_length", None) is None
            for config in (generation_config, model.generation_config)
        )
        and "max_length" not in kwargs
    )
    config, extras = model._prepare_generation_config(generation_config, **kwargs)
    check_extra_inputs(model, extras)
    given = set(kwargs)
    if generation_config is not None:
        given |= {name for name, value in vars(generation_config).items() if value is not None}
    origin = Origin(model, given)
    notes = refuse_unsupported(config, origin)
    model._prepare_special_tokens(
        config, attention_mask is not None, device="cpu", batch_size=batch_size
    )
    num_beams, returned = num_beams_of(config), sequences_per_prompt(config)
    own_search = None
    if num_beams > 1:
        returned = 1  # the beams of a prompt share its sequence, and the best are returned
        arguments = {
            "input_ids": input_ids, "attention_mask": attention_mask, "tokenizer": tokenizer,
            "generation_config": generation_config, "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria, "past_key_values": past_key_values,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn, **kwargs,
            "return_dict_in_generate": True,
        }  # fmt: skip
        arguments = {name: value for name, value in arguments.items() if value is not None}
        own_search = partial(class_generate(model), **arguments)
    mask = check_mask(model, ids if embeds is None else embeds, attention_mask, config)
    names = inputs_beyond_text(model, ids, mask, {**extras, "past_key_values": past_key_values})
    prefill = None
    if names:
        prefill = prepare_prefill(
            model, input_ids, attention_mask, past_key_values, config, extras, names
        )
    # In the order of _expand_inputs_for_generation: the sequences of a prompt follow one another.
    ids, mask = ids.repeat_interleave(returned, dim=0), mask.repeat(returned, axis=0)
    batch_size = len(mask)
    if config.max_new_tokens is not None:
        has_default_max_length = has_default_max_length or config.max_length is None
    config = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=has_default_max_length,
        has_default_min_length=True,
        model_input_name="input_ids",
        inputs_tensor=ids,
        input_ids_length=columns,
    )
    criteria = model._get_stopping_criteria(
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(stopping_criteria or []),
        tokenizer=tokenizer,
    )
    # Warpers (temperature, top-k, ...) become parameters of the ops. With do_sample off, Hugging
    # Face builds only the other processors. They are called for one sequence, so for one beam.
    do_sample = bool(config.do_sample)
    config.do_sample, config.num_beams = False, 1
    device = model.device  # Transformers looks for it in the parameters
    processors = [
        model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=columns,
            encoder_input_ids=ids[b : b + 1].to(device),
            prefix_allowed_tokens_fn=allowed_tokens_of(prefix_allowed_tokens_fn, b),
            logits_processor=LogitsProcessorList(logits_processor or []),
            device=device,
            model_kwargs={"attention_mask": torch.from_numpy(mask[b : b + 1]).to(device)},
        )
        for b in range(batch_size)
    ]
    config.do_sample, config.num_beams = do_sample, num_beams
    return build_call(
        model, ids, mask, config, per_sequence, processors, criteria, past_key_values, prefill,
        origin, assistant_of(config, origin, assistant_model, assistant_tokenizer, tokenizer),
        notes, own_search=own_search,
    )  # fmt: skip


def _pop_per_sequence(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling parameters that have one value for each sequence, and return them."""
    return {name: kwargs.pop(name) for name in PARAMETERS if is_per_sequence(kwargs.get(name))}


def _encoder_decoder_call(model: Any, **arguments: Any) -> Call:
    """`prepare_call` of an encoder-decoder, whose encoder runs here."""
    for name in ("input_ids", "inputs", "attention_mask"):
        check_tensor(name, arguments[name])
    per_sequence = _pop_per_sequence(arguments)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    refuse_kept(model, arguments)
    kept: dict[str, Any] = {"kwargs": set(arguments), "synced_gpus": False}
    for name in ("assistant_model", "assistant_tokenizer", "tokenizer"):
        kept[name] = arguments.pop(name, None)
    strings = arguments.pop("stop_strings", None)
    if strings is not None:  # for which model.generate would look for the tokenizer
        given = arguments.get("stopping_criteria") or ()
        stop = StopStringCriteria(kept["tokenizer"], strings)
        arguments["stopping_criteria"] = StoppingCriteriaList([*given, stop])

    def read(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Call:
        return call_from_hugging_face(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs,
            kept, per_sequence,
        )  # fmt: skip

    call: Call = by_generate(model, read, arguments)
    return call
