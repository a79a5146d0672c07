"""Inputs of the model beyond text: images, audio, token types, embeddings, positions.

The loop feeds a model token ids, positions and a mask. A call that has more inputs is prefilled by
the model's own methods, with exactly the arguments that ``model.generate`` would use. These are
read here; extras/own_prefill.py makes the prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationMode

from specdec_hf.runner.protocol import CACHE_NAME


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
        from specdec_hf.extras.handover import check_batch  # noqa: PLC0415  # rarely asked for

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
    from specdec_hf.extras.handover import copy_of  # noqa: PLC0415  # rarely asked for

    return copy_of(past)
