"""From Hugging Face arguments to what the loop needs: one `Call` per generate call.

Temperature and filters become parameters of the fused ops. All other logits processors and stopping
criteria remain Hugging Face's own objects, called with the prefix of one sequence at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from specdec_hf.cache.encoded import Encoded, is_encoder_decoder
from specdec_hf.hf_arguments.assistant import Assistant, assistant_of
from specdec_hf.hf_arguments.beams import BeamArguments, beam_arguments, num_beams_of
from specdec_hf.hf_arguments.encoder import EncoderSource, by_generate, read_encoder
from specdec_hf.hf_arguments.inputs import (
    check_decoder_mask,
    check_input_ids,
    check_mask,
    check_tensor,
    has_own_generate,
    mask_on_host,
    one_of,
)
from specdec_hf.hf_arguments.model_inputs import (
    Prefill,
    check_extra_inputs,
    given_prefill,
    inputs_beyond_text,
    prepare_prefill,
)
from specdec_hf.hf_arguments.processors import allowed_tokens_of, processor_of, warper_parameter
from specdec_hf.hf_arguments.sampling import (
    PARAMETERS,
    Sampling,
    is_per_sequence,
    make_sampling,
    sequences_per_prompt,
)
from specdec_hf.hf_arguments.unsupported import Origin, refuse_kept, refuse_unsupported

# Plain generation returns these for every new token.
TOKEN_OUTPUTS = ("scores", "logits", "hidden_states")


@dataclass
class Call:
    """The arguments of one generate call, which do not change while it runs.

    Attributes:
        input_ids: [B, T] int64 on the host, as given, padding included; T is 0 where the prompt is
            given as ``inputs_embeds`` alone.
        mask: [B, P] bool, columns of the prompt that hold a token; P is T, or the columns of
            ``inputs_embeds``.
        max_new_tokens: most new tokens of each sequence.
        eos: ids that end a sequence.
        pad: id that fills up sequences that ended early.
        sampling: parameters of the fused ops.
        do_sample: False is greedy.
        processors: one list per sequence, empty where nothing is to be applied.
        criteria: stopping criteria other than length and end-of-sequence.
        past: the caller's cache, which is never written to, or None.
        prefill: the model's own prefill of inputs other than text, or None.
        encoded: what the decoder of an encoder-decoder reads of its encoder; ``input_ids``,
            ``mask`` and ``past`` are then those of the decoder.
        encoder: what the encoder read, where that is known.
        assistant: the drafts that the arguments of ``model.generate`` ask for.
        return_dict: whether the caller wants the whole output.
        outputs: which of "scores", "logits" and "hidden_states" the caller wants.
        beams: arguments of beam search, or None.
        num_return_sequences: how many sequences that follow one another continue one prompt.
        notes: remarks for the statistics.
    """

    input_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    max_new_tokens: int
    eos: frozenset[int]
    pad: int
    sampling: Sampling
    do_sample: bool
    processors: list[LogitsProcessorList]
    criteria: StoppingCriteriaList
    past: Any
    return_dict: bool
    outputs: frozenset[str] = frozenset()
    beams: BeamArguments | None = None
    num_return_sequences: int = 1
    prefill: Prefill | None = None
    encoded: Encoded | None = None
    encoder: EncoderSource | None = None
    assistant: Assistant = field(default_factory=Assistant)
    notes: list[str] = field(default_factory=list)

    @property
    def prompt_ids(self) -> NDArray[np.int64]:
        """[B, P], the ids of the prompt's columns; 0 where only their embeddings are known."""
        if self.input_ids.shape == self.mask.shape:
            return self.input_ids
        return np.zeros(self.mask.shape, dtype=np.int64)


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
        TypeError: a sampling parameter that is no number, by name.
        ValueError: an argument that is unknown, unsupported or out of range, by name.
    """
    if has_own_generate(model):
        raise ValueError(
            f"{type(model).__name__} has a generate method of its own: pass custom_generate to it"
        )
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
    refuse_kept(kwargs)
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
    if num_beams > 1:
        returned = 1  # the beams of a prompt share its sequence, and the best are returned
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
    processors = [
        model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=columns,
            encoder_input_ids=ids[b : b + 1].to(model.device),
            prefix_allowed_tokens_fn=allowed_tokens_of(prefix_allowed_tokens_fn, b),
            logits_processor=LogitsProcessorList(logits_processor or []),
            device=model.device,
            model_kwargs={"attention_mask": torch.from_numpy(mask[b : b + 1]).to(model.device)},
        )
        for b in range(batch_size)
    ]
    config.do_sample, config.num_beams = do_sample, num_beams
    return build_call(
        model, ids, mask, config, per_sequence, processors, criteria, past_key_values, prefill,
        origin, assistant_of(config, origin, assistant_model, assistant_tokenizer, tokenizer),
        notes,
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
    refuse_kept(arguments)
    kept: dict[str, Any] = {"kwargs": set(arguments), "tokenizer": arguments.get("tokenizer")}
    for name in ("assistant_model", "assistant_tokenizer"):
        kept[name] = arguments.pop(name, None)

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
    if num_beams > 1 and of_decoder:
        where = Origin(model, set(arguments_kept.get("kwargs", ()))).of("num_beams", num_beams)
        raise ValueError(f"num_beams={num_beams} is not supported for encoder-decoders{where}")
    if num_beams > 1:
        input_ids, model_kwargs = _first_beams(input_ids, model_kwargs, num_beams)
    embeds = None if of_decoder else model_kwargs.get("inputs_embeds")
    ids = check_input_ids(model, input_ids, embeds)
    refuse_kept(arguments_kept)
    origin = Origin(model, set(arguments_kept.get("kwargs", ())))
    notes = refuse_unsupported(generation_config, origin)
    mask = np.ones(tuple((ids if embeds is None else embeds).shape[:2]), dtype=bool)
    encoded = encoder = prefill = None
    if of_decoder:
        if generation_config.output_hidden_states:
            raise ValueError("output_hidden_states=True is not supported for encoder-decoders")
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
    )  # fmt: skip


def build_call(
    model: Any,
    ids: torch.Tensor,
    mask: NDArray[np.bool_],
    config: GenerationConfig,
    per_sequence: dict[str, Any],
    processors: list[LogitsProcessorList],
    criteria: StoppingCriteriaList,
    past: Any,
    prefill: Prefill | None,
    origin: Origin,
    assistant: Assistant,
    notes: list[str],
    *,
    encoded: Encoded | None = None,
    encoder: EncoderSource | None = None,
) -> Call:
    """Assemble a `Call` from a complete generation config."""
    columns = ids.shape[1]
    max_length = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
    if columns >= max_length:
        raise ValueError(
            f"input_ids has {columns} columns, but generation is limited to {max_length}"
        )
    eos: set[int] = set()
    others = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is not MaxLengthCriteria:
            others.append(criterion)
    pad = config._pad_token_tensor
    do_sample = bool(config.do_sample)
    num_beams, returned = num_beams_of(config), sequences_per_prompt(config)
    beams = beam_arguments(config, num_beams, returned)
    try:
        sampling = make_sampling(config, per_sequence, do_sample, len(mask), model.device, returned)
    except (TypeError, ValueError) as error:
        name = str(error).split()[0]
        raise type(error)(f"{error}{origin.of(name, getattr(config, name, None))}") from error
    return Call(
        input_ids=ids.numpy(),
        mask=mask,
        max_new_tokens=max_length - columns,
        eos=frozenset(eos),
        pad=int(pad) if pad is not None else 0,
        sampling=sampling,
        do_sample=do_sample,
        processors=processors,
        criteria=others,
        past=past,
        return_dict=bool(config.return_dict_in_generate),
        outputs=frozenset(
            name
            for name in TOKEN_OUTPUTS
            if config.return_dict_in_generate and getattr(config, f"output_{name}")
        ),
        beams=beams,
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
