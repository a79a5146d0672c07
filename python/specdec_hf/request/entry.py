"""The ways through ``model.generate``, which prepares the arguments that the reader reads.

`specdec_hf.generate` goes through it too, because classes of models differ in how they prepare
their inputs. It comes back with the `Call`, so that the rounds run outside of it. Classes that
replace ``generate`` may decode several texts and take the outputs apart, so there they run inside.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import Cache
from transformers.generation.utils import (
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
)
from transformers.utils.generic import ModelOutput

from specdec_hf.arguments import PARAMETERS, shown
from specdec_hf.request.call import Call
from specdec_hf.request.inputs import check_input_ids, check_mask_shape, check_tensor, one_of
from specdec_hf.request.prefill import REFUSED
from specdec_hf.request.reader import read_call
from specdec_hf.request.sampling import is_per_sequence
from specdec_hf.request.unsupported import (
    Origin,
    check_types,
    refuse_kept,
    refuse_unsupported,
)
from specdec_hf.runner.encoded import is_encoder_decoder
from specdec_hf.runner.protocol import CACHE_NAME, forward_arguments

_FUNCTION: Any = inspect.unwrap(GenerationMixin.generate)
_GENERATE = _FUNCTION.__code__
# Of torch.no_grad, the innermost of the decorators.
_DECORATOR = inspect.unwrap(
    GenerationMixin.generate, stop=lambda one: vars(one)["__wrapped__"] is _FUNCTION
).__code__
_KEPT = (
    "streamer", "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask",
    "synced_gpus", "kwargs",
)  # fmt: skip
_REMOVED = ("tokenizer", "assistant_tokenizer")
# Fields of a generation config that make it one of assisted generation.
_OF_ASSISTANTS = ("prompt_lookup_num_tokens", "assistant_early_exit")


def has_own_generate(model: Any) -> bool:
    """Whether a class of Transformers replaces ``generate``, which then prepares its inputs."""
    if not isinstance(model, PreTrainedModel):
        return False
    own: Any = getattr(type(model), "generate", GenerationMixin.generate)
    return inspect.unwrap(own) is not inspect.unwrap(GenerationMixin.generate)


def _class_generate(model: Any) -> Callable[..., Any]:
    """``generate`` of a model's class.

    A model that Transformers loaded from a folder with a ``custom_generate`` has that function in
    the place of ``model.generate``.
    """
    if "generate" in vars(model):
        return partial(type(model).generate, model)
    method: Callable[..., Any] = model.generate
    return method


def prepare_call(
    model: Any,
    input_ids: torch.Tensor | None = None,
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
    """The `Call` of Hugging Face's arguments, none of which is changed.

    ``model.generate`` drops some of them where it calls a ``custom_generate``, refuses a
    temperature of 0, and takes one value of a sampling parameter for all sequences. These go around
    it.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: an argument that is unknown, unsupported or out of range, by name.
    """
    if has_own_generate(model):
        raise ValueError(
            f"{type(model).__name__} has a generate method of its own: pass custom_generate to it"
        )
    defaults = getattr(model, "generation_config", None)
    check_types(kwargs, generation_config, defaults)
    if not is_encoder_decoder(model):
        input_ids, inputs = one_of(inputs, input_ids), None
        embeds = kwargs.get("inputs_embeds")
        ids = check_input_ids(model, input_ids, embeds)
        check_mask_shape(attention_mask, ids if embeds is None else embeds)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    in_config = vars(generation_config) if generation_config is not None else {}
    given = {name for name, value in in_config.items() if value is not None}
    origin = Origin(model, given | kwargs.keys())
    refuse_kept(model, kwargs)
    others = {"kwargs": origin.names, "synced_gpus": False, "tokenizer": tokenizer}
    for name in ("assistant_model", "assistant_tokenizer"):
        others[name] = kwargs.pop(name, None)
    kwargs.pop("trust_remote_code", None)
    sampling = {name: kwargs.pop(name) for name in PARAMETERS if is_per_sequence(kwargs.get(name))}
    config, extras = model._prepare_generation_config(generation_config, **kwargs)
    extras = {name: value for name, value in extras.items() if not hasattr(config, name)}
    _check_extras(model, extras)
    if past_key_values is not None and CACHE_NAME not in forward_arguments(model):
        raise ValueError(
            f"past_key_values of {type(model).__name__} is not supported: its forward takes none"
        )
    refuse_unsupported(copy.copy(config), origin)
    arguments = {
        "inputs": inputs, "input_ids": input_ids, "attention_mask": attention_mask,
        CACHE_NAME: copy.copy(past_key_values),  # model.generate would mark it
        "logits_processor": logits_processor, "stopping_criteria": stopping_criteria,
        "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
    }  # fmt: skip
    for name in ("inputs", "input_ids", "attention_mask"):
        check_tensor(name, arguments[name])
        if arguments[name] is not None:
            arguments[name] = arguments[name].to(model.device)
    arguments = extras | {name: value for name, value in arguments.items() if value is not None}
    for name, parameter in PARAMETERS.items():
        value = getattr(config, name, None)
        sampling.setdefault(name, value)
        if config.do_sample and value is not None:  # else Transformers warns of unused values
            setattr(config, name, parameter.neutral)
    for name in ("max_length", "min_length"):
        if name not in origin.names and getattr(defaults, name, None) is None:
            setattr(config, name, None)  # model.generate counts its own default after the prompt
    strings = config.stop_strings
    # They would be refused with several sequences of a prompt.
    drafts = {name: getattr(config, name) for name in _OF_ASSISTANTS}
    around = list(_OF_ASSISTANTS)
    if strings is not None and tokenizer is not None:
        around.append("stop_strings")
        stop = StopStringCriteria(tokenizer, strings)
        arguments["stopping_criteria"] = StoppingCriteriaList([*(stopping_criteria or ()), stop])
    for name in around:
        setattr(config, name, None)
        if getattr(defaults, name, None) is not None:
            arguments[name] = None

    def read(
        _: Any,  # the model inside of a wrapper
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Any = None,  # handed over because it is named here
        **model_kwargs: Any,
    ) -> Call:
        for name, value in drafts.items():
            setattr(generation_config, name, value)
        model_kwargs["inputs_tensor"] = inputs_tensor
        return read_call(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs,
            others, sampling,
        )  # fmt: skip

    call: Call = _class_generate(model)(generation_config=config, custom_generate=read, **arguments)
    return call


def name_past(kwargs: dict[str, Any]) -> None:
    """Give a caller's cache its name here: where Transformers says ``cache``, that is an option.

    Raises:
        ValueError: both names are used.
    """
    if isinstance(kwargs.get("cache"), Cache):
        if kwargs.get("past_key_values") is not None:
            raise ValueError("cache and past_key_values are the same argument, got both")
        kwargs["past_key_values"] = kwargs.pop("cache")


def _check_extras(model: Any, extras: dict[str, Any]) -> None:
    """Raises ValueError for arguments that neither the loop nor the model's forward takes."""
    unknown = []
    for name, value in extras.items():
        try:
            model._validate_model_kwargs({name: value})
        except ValueError:
            unknown.append(name)
    if unknown:
        raise ValueError(f"unknown or unsupported arguments: {', '.join(sorted(unknown))}")
    for name in () if is_encoder_decoder(model) else sorted(REFUSED & extras.keys()):
        raise ValueError(f"{name} is not supported")


def kept_arguments(model: Any, decoder: Any) -> dict[str, Any]:
    """Arguments that the ``model.generate`` that called a decoder keeps; empty for others.

    It hands a ``custom_generate`` neither ``streamer`` nor ``assistant_model`` and would drop them
    without a word. They are local variables of the frame that calls the decoder, which is the only
    place to read them from. The tokenizers are removed even there; the frame of the decorator
    around ``generate`` still has them.

    Args:
        model: the model that the decoder was called with.
        decoder: the decoder. A function of the caller's own may stand between the two.

    Returns:
        The arguments that are not None, and ``kwargs``, a dict of the others that it was given.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return {}
    held = frame.f_locals
    # A decoder may also be called within a generate that decodes something else, as by a processor.
    called = held.get("custom_generate")
    other = called is not decoder and isinstance(called, type(decoder))
    if held.get("self") is not model or not callable(called) or other:
        return {}
    kept = {name: held[name] for name in _KEPT if held.get(name) is not None}
    around = frame.f_back
    given = around.f_locals["kwargs"] if around and around.f_code is _DECORATOR else {}
    return kept | {name: given[name] for name in _REMOVED if given.get(name) is not None}


def by_own_generate(
    model: Any,
    inputs: dict[str, torch.Tensor | None],
    decoder: Callable[..., Any],
    seed: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Let a class that replaces ``generate`` prepare its inputs, such as BLIP-2 for its decoder.

    Args:
        model: the model.
        inputs: ``inputs`` and ``input_ids``, where the caller gave them.
        decoder: a `SpeculativeDecoder` with the options of the call.
        seed: the seed among these options.
        kwargs: the other arguments of the caller.

    Raises:
        ValueError: an argument or a class that cannot be served in this way, by name.
    """
    for name in filter(lambda name: is_per_sequence(kwargs.get(name)), PARAMETERS):
        raise ValueError(f"{name} must be a scalar for {type(model).__name__}")
    calls = 0
    stats: Any = None

    def decode(model: Any, ids: torch.Tensor, *, inputs_tensor: Any = None, **others: Any) -> Any:
        nonlocal calls, stats
        calls += 1
        if calls > 1 and seed is not None and others["generation_config"].do_sample:
            raise ValueError(
                f"seed must be None where the generate of {type(model).__name__} decodes several "
                f"texts, each of which needs its own, got {shown(seed)}"
            )
        output = decoder(model, ids, inputs_tensor=inputs_tensor, **others)
        stats = getattr(output, "stats", None)
        return output

    kwargs.update((name, value) for name, value in inputs.items() if value is not None)
    output = _class_generate(model)(custom_generate=decode, **kwargs)
    if calls == 0 or (calls > 1 and not is_encoder_decoder(model)):
        raise ValueError(
            f"{type(model).__name__} is not supported: its own generate decodes {calls} texts "
            "with custom_generate, not one"
        )
    if stats is not None and calls > 1:
        stats.note(f"{calls} texts were decoded; these are the statistics of the last")
    if stats is not None and isinstance(output, ModelOutput):
        output.stats = stats
    elif stats is not None and isinstance(output, dict):
        output["stats"] = stats
    return output


def plain_output(output: Any) -> ModelOutput:
    """The output in the form of Transformers, for a generate that takes it apart, as Whisper's.

    What plain generation does not give is left in attributes.
    """
    kind: type[ModelOutput] = GenerateEncoderDecoderOutput
    names = ["sequences", "scores", "logits", CACHE_NAME]
    if output.beam_indices is not None:
        kind = GenerateBeamEncoderDecoderOutput
        names += ["sequences_scores", "beam_indices"]
    plain = kind(**{name: getattr(output, name) for name in names})
    for name in ("attention_mask", "logprobs", "encoder_outputs", "stats"):
        setattr(plain, name, getattr(output, name))
    return plain
