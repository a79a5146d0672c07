"""Inputs of the model beyond text: images, audio, token types, embeddings, positions.

The loop feeds a model token ids, positions and a mask. A call that has more inputs is prefilled by
the model's own methods, with exactly the arguments that ``model.generate`` would use; see
loop/prefill.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from specdec_hf.runner.plain_runner import copy_of
from specdec_hf.runner.protocol import forward_arguments

# The loop makes these itself, so they call for no prefill of the model's own.
MADE_BY_THE_LOOP = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache"}
    | {"logits_to_keep", "output_attentions", "output_hidden_states"}
)
HOLED_MASK = "attention_mask with padding that is not on the left"
# Arguments of forward that plain generation would pass on, but that change what it returns or what
# the loop relies on.
REFUSED = frozenset(
    {"labels", "logits_to_keep", "num_logits_to_keep", "return_dict", "cache_params"}
    | {"cache_position", "encoder_outputs"}
)


@dataclass
class Prefill:
    """The arguments of the model's own prefill, as ``model.generate`` would hold them.

    Attributes:
        input_ids: [B, T] int64; T is 0 where the prompt is given as ``inputs_embeds`` alone.
        model_kwargs: keyword arguments of ``prepare_inputs_for_generation``.
        config: the complete generation config.
        names: the arguments that the loop cannot feed by itself.
    """

    input_ids: torch.Tensor
    model_kwargs: dict[str, Any]
    config: GenerationConfig
    names: list[str]


def check_extra_inputs(model: Any, extras: dict[str, Any]) -> None:
    """Raises ValueError for arguments that neither the loop nor the model's forward takes."""
    unknown = []
    for name, value in extras.items():
        try:
            model._validate_model_kwargs({name: value})
        except ValueError:
            unknown.append(name)
    if unknown:
        raise ValueError(f"unknown or unsupported arguments: {', '.join(sorted(unknown))}")
    for name in sorted(REFUSED & extras.keys()):
        raise ValueError(f"{name} is not supported")


def extra_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The entries of ``model_kwargs`` that the loop does not make itself.

    Raises:
        ValueError: an iterator, an argument of `REFUSED`, or a cache of the caller under another
            name than ``past_key_values``.
    """
    for name, value in model_kwargs.items():
        # ``model.generate`` sets logits_to_keep, and marks the caches that it did not make.
        made = name == "logits_to_keep" or (
            name == "cache_params" and not getattr(value, "_is_user_defined", False)
        )
        if name in REFUSED and value is not None and not made:
            raise ValueError(f"{name} is not supported")
        if isinstance(value, Iterator):
            raise ValueError(f"{name} is not supported: an iterator cannot be read twice")
    return {
        name: value
        for name, value in model_kwargs.items()
        if value is not None
        and name not in MADE_BY_THE_LOOP
        # Set for every call of a model with images, and empty without them.
        and not (name == "mm_encoder_outputs" and not value)
    }


def inputs_beyond_text(
    model: Any, ids: torch.Tensor, mask: NDArray[np.bool_], model_kwargs: dict[str, Any]
) -> list[str]:
    """Names of the arguments for which the model itself must make the prefill.

    Args:
        model: the model. Where it keeps the offset of multimodal positions, that is set as
            ``model.generate`` sets it.
        ids: [B, T] int64.
        mask: [B, P] bool.
        model_kwargs: the model's inputs; ``position_ids`` may be left for the model to make.
    """
    names = sorted(extra_inputs(model_kwargs))
    if not bool((mask[:, :-1] <= mask[:, 1:]).all()):
        # With padding on the right, or holes, plain generation counts positions from the last
        # column, be it a token or not.
        names.append(HOLED_MASK)
    position_ids = model_kwargs.get("position_ids")
    if position_ids is None and not names and "position_ids" in forward_arguments(model):
        text = {"attention_mask": torch.from_numpy(mask.astype(np.int64)).to(ids.device)}
        past = model_kwargs.get("past_key_values")
        if past is not None:
            text["past_key_values"] = past
        position_ids = model._prepare_position_ids_for_generation(ids, text)
    if position_ids is not None and _differ_from_text(position_ids, mask):
        names.append("position_ids")
    return names


def _differ_from_text(position_ids: torch.Tensor, mask: NDArray[np.bool_]) -> bool:
    """Whether positions [..., B, P] are other than the number of tokens before each."""
    held = torch.from_numpy(mask)
    text = (held.long().cumsum(-1) - 1).masked_fill(~held, 0)
    given = position_ids.cpu()
    return given.shape[-1] != text.shape[1] or not bool((given == text).all())


def prepare_prefill(
    model: Any,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    past: Any,
    config: GenerationConfig,
    extras: dict[str, Any],
    names: list[str],
) -> Prefill:
    """The steps of ``model.generate`` that make a model's inputs, up to its prefill.

    Args:
        model: the model, which may keep state, such as the offsets of multimodal positions.
        input_ids: as the caller gave them, or None with ``inputs_embeds``.
        attention_mask: as the caller gave it.
        past: the caller's cache, which is not written to.
        config: complete, with its special tokens prepared.
        extras: all other inputs.
        names: the arguments that make this necessary.

    Raises:
        ValueError: inputs that the model refuses.
    """
    kwargs = dict(extras)
    for name, value in (
        ("input_ids", input_ids),
        ("attention_mask", attention_mask),
        ("past_key_values", copied(past)),
    ):
        if value is not None:
            kwargs[name] = value
    inputs, name, kwargs = model._prepare_model_inputs(None, config.bos_token_id, kwargs)
    if attention_mask is None and "attention_mask" in forward_arguments(model):
        kwargs["attention_mask"] = model._prepare_attention_mask_for_generation(
            inputs, config, kwargs
        )
    if kwargs.get("position_ids") is None and "position_ids" in forward_arguments(model):
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(inputs, kwargs)
    mask = kwargs.get("attention_mask")
    if mask is not None and bool((mask == 1).all()):
        config._mask_length = mask.shape[1]
        kwargs["attention_mask"] = None
    kwargs = model._maybe_prepare_encoder_kwargs_for_generation(inputs, kwargs, name, config)
    ids = inputs if name == "input_ids" else kwargs.pop("input_ids")
    ids, kwargs = model._expand_inputs_for_generation(
        expand_size=config.num_return_sequences or 1, input_ids=ids, **kwargs
    )
    if model._supports_logits_to_keep():
        kwargs["logits_to_keep"] = 1
    model._prepare_cache_for_generation(
        config, kwargs, GenerationMode.GREEDY_SEARCH, ids.shape[0], inputs.shape[1]
    )
    kwargs["use_cache"] = True
    return Prefill(ids, kwargs, config, names)


def given_prefill(
    model: Any,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
    names: list[str],
) -> Prefill:
    """The same from what ``model.generate`` hands to a ``custom_generate`` callable."""
    kwargs = dict(model_kwargs)
    past = kwargs.get("past_key_values")
    if past is not None and getattr(past, "_is_user_defined", False):
        kwargs["past_key_values"] = copied(past)
    if kwargs.get("use_cache") is False:
        kwargs["use_cache"] = True
        model._prepare_cache_for_generation(
            config, kwargs, GenerationMode.GREEDY_SEARCH, len(input_ids), input_ids.shape[1]
        )
    return Prefill(input_ids, kwargs, config, names)


def copied(past: Any) -> Any:
    """A cache that a forward may extend without changing the caller's."""
    if past is None:
        return None
    if not isinstance(past, DynamicCache):
        raise ValueError(
            "past_key_values must be a DynamicCache with inputs other than text, "
            f"got {type(past).__name__}"
        )
    return copy_of(past)
