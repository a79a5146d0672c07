"""Inputs of the model beyond text: images, audio, token types, embeddings, positions.

The loop feeds a model token ids, positions and a mask. A call that has more inputs is prefilled by
the model's own methods, with exactly the arguments that ``model.generate`` would use. These are
read here; loop/own_prefill.py makes the prefill.
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

from specdec_hf.runner.protocol import CACHE_NAME

# The loop makes these itself, so they call for no prefill of the model's own.
MADE_BY_THE_LOOP = frozenset(
    {"attention_mask", "position_ids", CACHE_NAME, "cache_params", "use_cache"}
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


def _extra_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
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


def inputs_beyond_text(mask: NDArray[np.bool_], model_kwargs: dict[str, Any]) -> list[str]:
    """Names of the arguments for which the model itself must make the prefill.

    Args:
        mask: [B, P] bool.
        model_kwargs: the model's inputs, prepared by ``model.generate``.
    """
    names = sorted(_extra_inputs(model_kwargs))
    if not bool((mask[:, :-1] <= mask[:, 1:]).all()):
        # With padding on the right, or holes, plain generation counts positions from the last
        # column, be it a token or not.
        names.append(HOLED_MASK)
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None and _differ_from_text(position_ids, mask):
        names.append("position_ids")
    return names


def _differ_from_text(position_ids: torch.Tensor, mask: NDArray[np.bool_]) -> bool:
    """Whether positions [..., B, P] are other than the number of tokens before each."""
    held = torch.from_numpy(mask)
    text = (held.long().cumsum(-1) - 1).masked_fill(~held, 0)
    given = position_ids.cpu()
    return given.shape[-1] != text.shape[1] or not bool((given == text).all())


def given_prefill(
    model: Any,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
    names: list[str],
) -> Prefill:
    """The model's inputs that ``model.generate`` prepared, without the caller's own cache."""
    kwargs = dict(model_kwargs)
    past = kwargs.get(CACHE_NAME)
    if past is not None and getattr(past, "_is_user_defined", False):
        from specdec_hf.runner.handover import check_batch  # noqa: PLC0415  # rarely asked for

        kwargs[CACHE_NAME] = copy_of_cache(past)
        check_batch(past.layers, len(input_ids))
    if kwargs.get("use_cache") is False:
        kwargs["use_cache"] = True
        model._prepare_cache_for_generation(
            config, kwargs, GenerationMode.GREEDY_SEARCH, len(input_ids), input_ids.shape[1]
        )
    return Prefill(input_ids, kwargs, config, names)


def copy_of_cache(past: Any) -> Any:
    """A cache that a forward may extend without changing the caller's."""
    if not isinstance(past, DynamicCache):
        raise ValueError(
            "past_key_values must be a DynamicCache with inputs other than text, "
            f"got {type(past).__name__}"
        )
    from specdec_hf.runner.handover import copy_of  # noqa: PLC0415  # rarely asked for

    return copy_of(past)
