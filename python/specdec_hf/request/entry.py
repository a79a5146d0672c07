"""The ways through ``model.generate``, which prepares the arguments that the reader reads.

`specdec_hf.generate` goes through it too, because classes of models differ in how they prepare
their inputs. It comes back with the `Call`, so that the rounds run outside of it; own_generate.py
serves classes that replace ``generate``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import Cache

from specdec_hf.arguments import PARAMETERS, did_you_mean
from specdec_hf.options import Options
from specdec_hf.request.call import Call
from specdec_hf.request.inputs import REFUSED, check_prompts, check_tensor, one_of
from specdec_hf.request.reader import Withheld, read_call
from specdec_hf.request.sampling import is_per_sequence
from specdec_hf.request.unsupported import ArgumentSource, check_types, refuse_unsupported
from specdec_hf.runner.protocol import CACHE_NAME, forward_arguments, is_encoder_decoder

# Fields of a generation config with which Transformers refuses several sequences of a prompt.
_OF_ASSISTANTS = ("prompt_lookup_num_tokens", "assistant_early_exit")
_OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


def has_own_generate(model: Any) -> bool:
    """Whether a class of Transformers replaces ``generate``, which then prepares its inputs."""
    if not isinstance(model, PreTrainedModel):
        return False
    own: Any = getattr(type(model), "generate", GenerationMixin.generate)
    return inspect.unwrap(own) is not inspect.unwrap(GenerationMixin.generate)


def class_generate(model: Any) -> Callable[..., Any]:
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
    past_key_values: Any = None,
    **kwargs: Any,
) -> Call:
    """The `Call` of Hugging Face's arguments, none of which is changed."""
    if has_own_generate(model):
        raise ValueError(
            f"{type(model).__name__} has a generate method of its own: pass custom_generate to it"
        )
    check_types(kwargs, generation_config, getattr(model, "generation_config", None))
    if not is_encoder_decoder(model):
        input_ids, inputs = one_of(inputs, input_ids), None
        check_prompts(input_ids, attention_mask, kwargs.get("inputs_embeds"))
    if past_key_values is not None and CACHE_NAME not in forward_arguments(model):
        raise ValueError(
            f"past_key_values of {type(model).__name__} is not supported: its forward takes none"
        )
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    kwargs.pop("trust_remote_code", None)
    withheld = take_withheld(kwargs, generation_config)
    arguments = {name: kwargs.pop(name, None) for name in _OBJECTS}
    tensors = {"inputs": inputs, "input_ids": input_ids, "attention_mask": attention_mask}
    for name, value in tensors.items():
        check_tensor(name, value)
        arguments[name] = value if value is None else value.to(model.device)
    arguments[CACHE_NAME] = copy.copy(past_key_values)  # model.generate would mark it
    config, others, withheld = _config_around(model, generation_config, kwargs, withheld)
    strings = withheld.fields.get("stop_strings")
    if strings is not None:
        add_stop_strings(arguments, withheld.tokenizer, strings)
    arguments = others | {name: value for name, value in arguments.items() if value is not None}

    # Transformers hands over what a custom_generate names and its own functions do not. The first
    # argument is the model inside of a wrapper.
    def read(_: Any, input_ids: Any, inputs_tensor: Any = None, **model_kwargs: Any) -> Call:
        return read_call(model, input_ids, withheld, inputs_tensor=inputs_tensor, **model_kwargs)

    try:
        call: Call = class_generate(model)(
            generation_config=config, custom_generate=read, **arguments
        )
    except ValueError as error:
        for name in others:
            hint = did_you_mean(name, [option.name for option in fields(Options)])
            if hint and repr(name) in str(error):
                raise ValueError(f"{name} is no argument of generate{hint}") from error
        raise
    return call


def take_withheld(kwargs: dict[str, Any], config: GenerationConfig | None) -> Withheld:
    """Take what ``model.generate`` hands on to nobody out of the arguments beside a config."""
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is not supported")
    of_config = {} if config is None else vars(config)
    given = {name for name, value in {**of_config, **kwargs}.items() if value is not None}
    names = ("assistant_model", "assistant_tokenizer", "tokenizer", "synced_gpus", "prediction")
    return Withheld(**{name: kwargs.pop(name, None) for name in names}, names=given)


def add_stop_strings(arguments: dict[str, Any], tokenizer: Any, strings: Any) -> None:
    """Make a stopping criterion of strings, which ``model.generate`` could not do."""
    criteria = arguments.get("stopping_criteria") or ()
    stop = StopStringCriteria(tokenizer, strings)
    arguments["stopping_criteria"] = StoppingCriteriaList([*criteria, stop])


def _config_around(
    model: Any, given: GenerationConfig | None, kwargs: dict[str, Any], withheld: Withheld
) -> tuple[GenerationConfig, dict[str, Any], Withheld]:
    """The complete config, the arguments that are no field of one, and what is withheld.

    A field that ``model.generate`` would refuse, or warn of, is left out of the config and
    withheld, too: values of sampling parameters, of which it takes neither 0 as a temperature nor
    one for each sequence, drafts, and stop strings that a criterion has taken over.
    """
    defaults = model.generation_config
    values = {name: kwargs.pop(name) for name in PARAMETERS if is_per_sequence(kwargs.get(name))}
    config, others = model._prepare_generation_config(given, **kwargs)
    others = {name: value for name, value in others.items() if not hasattr(config, name)}
    for name in () if is_encoder_decoder(model) else sorted(REFUSED & others.keys()):
        raise ValueError(f"{name} is not supported")
    notes = refuse_unsupported(config, ArgumentSource(model, withheld.names))
    around: dict[str, Any] = dict.fromkeys(_OF_ASSISTANTS)
    if withheld.tokenizer is not None:
        around["stop_strings"] = None
    if config.do_sample:  # else Transformers warns of unused values
        for name, parameter in PARAMETERS.items():
            if getattr(config, name, None) is not None:
                around[name] = parameter.neutral
    for name, neutral in around.items():
        values.setdefault(name, getattr(config, name))
        setattr(config, name, neutral)
        if neutral is None and getattr(defaults, name, None) is not None:
            others[name] = None
    for name in ("max_length", "min_length"):
        if name not in withheld.names and getattr(defaults, name, None) is None:
            setattr(config, name, None)  # model.generate counts its own default after the prompt
    return config, others, replace(withheld, fields=values, notes=notes)


def rename_cache(kwargs: dict[str, Any]) -> None:
    """Give a caller's cache its name here: where Transformers says ``cache``, that is an option."""
    if isinstance(kwargs.get("cache"), Cache):
        if kwargs.get("past_key_values") is not None:
            raise ValueError("cache and past_key_values are the same argument, got both")
        kwargs["past_key_values"] = kwargs.pop("cache")
