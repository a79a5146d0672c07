"""Checks of ``input_ids`` and ``attention_mask``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from specdec_hf.runner.protocol import vocab_size_of


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


def one_of(inputs: Any, input_ids: Any) -> Any:
    """The prompts, which may be given under either name.

    Raises:
        ValueError: both names are used.
    """
    if inputs is not None and input_ids is not None:
        raise ValueError("inputs and input_ids are the same argument, got both")
    return inputs if input_ids is None else input_ids


def check_tensor(name: str, value: Any) -> None:
    """Raises TypeError for what is no tensor, with what to pass instead."""
    if value is None or isinstance(value, torch.Tensor):
        return
    instead = ""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
        instead = "; pass **tokenizer(text, return_tensors='pt')"
    elif isinstance(value, Mapping):
        instead = "; pass its entries, as in generate(model, **inputs)"
    elif isinstance(value, list | tuple | np.ndarray):
        instead = "; pass a torch.tensor of it"
    raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}{instead}")


def check_input_ids(
    model: Any, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None = None
) -> torch.Tensor:
    """``input_ids`` [B, T] as int64 on the host; T is 0 with ``inputs_embeds`` alone.

    Raises:
        TypeError: no tensor.
        ValueError: missing or empty prompt, wrong shape or id.
    """
    check_tensor("input_ids", input_ids)
    check_tensor("inputs_embeds", inputs_embeds)
    if inputs_embeds is not None:
        if inputs_embeds.ndim != 3:
            raise ValueError(
                f"inputs_embeds must be [B, T, hidden], got shape {list(inputs_embeds.shape)}"
            )
        if input_ids is None or input_ids.numel() == 0:
            return torch.zeros((inputs_embeds.shape[0], 0), dtype=torch.int64, device="cpu")
        if input_ids.shape != inputs_embeds.shape[:2]:
            raise ValueError(
                f"input_ids must be [B, T] = {list(inputs_embeds.shape[:2])} as inputs_embeds, "
                f"got {list(input_ids.shape)}"
            )
    if input_ids is None:
        raise ValueError("input_ids is required")
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be [B, T], got shape {list(input_ids.shape)}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids must be int32 or int64, got {input_ids.dtype}")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids is empty: shape {list(input_ids.shape)}")
    ids = input_ids.detach().to("cpu", torch.int64)
    vocab_size = vocab_size_of(model)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(
            f"input_ids must be in [0, {vocab_size}), "
            f"got ids from {int(ids.min())} to {int(ids.max())}"
        )
    return ids


def check_mask(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor | None, config: GenerationConfig
) -> NDArray[np.bool_]:
    """``attention_mask`` [B, T] as bool on the host; None is made as ``model.generate`` makes it.

    Args:
        model: the model.
        ids: [B, T] int64, or the embeddings [B, T, hidden] given in their place.
        attention_mask: as the caller gave it.
        config: with its special tokens prepared.

    Raises:
        TypeError: no tensor.
        ValueError: wrong shape, or a prompt without tokens.
    """
    check_tensor("attention_mask", attention_mask)
    if attention_mask is None:
        attention_mask = model._prepare_attention_mask_for_generation(ids, config, {})
    if attention_mask.shape != ids.shape[:2]:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {list(ids.shape[:2])}, "
            f"got {list(attention_mask.shape)}"
        )
    return mask_on_host(attention_mask)


def check_decoder_mask(ids: torch.Tensor, model_kwargs: dict[str, Any]) -> NDArray[np.bool_]:
    """``decoder_attention_mask`` [B, T] as bool on the host; None hides nothing.

    Args:
        ids: [B, T] int64, those of the decoder.
        model_kwargs: may hold the mask, and the caller's ``past_key_values``.

    Raises:
        TypeError: no tensor.
        ValueError: wrong shape, a hidden column that is not on the left, or no mask with a cache of
            the caller.
    """
    given = model_kwargs.get("decoder_attention_mask")
    check_tensor("decoder_attention_mask", given)
    if given is None:
        past = model_kwargs.get("past_key_values")
        if past is not None and past.get_seq_length() > 0:
            # Without it, plain generation takes all of decoder_input_ids as new.
            raise ValueError("decoder_attention_mask must be given with past_key_values")
        return np.ones(tuple(ids.shape), dtype=bool)
    if given.shape != ids.shape:
        raise ValueError(
            f"decoder_attention_mask must have the shape of decoder_input_ids {list(ids.shape)}, "
            f"got {list(given.shape)}"
        )
    mask = mask_on_host(given)
    if not bool((mask[:, :-1] <= mask[:, 1:]).all()):
        raise ValueError("decoder_attention_mask must hide columns on the left only")
    return mask


def mask_on_host(attention_mask: torch.Tensor) -> NDArray[np.bool_]:
    """A mask [B, T] as bool on the host.

    Raises:
        ValueError: a value other than 0 and 1, or a prompt without tokens.
    """
    given = attention_mask.detach().cpu()
    mask: NDArray[np.bool_] = (given != 0).numpy()
    others = given[(given != 0) & (given != 1)]
    if others.numel():
        raise ValueError(f"attention_mask must hold 0 and 1, got {others[0].item()}")
    for b in np.flatnonzero(~mask.any(axis=1)):
        raise ValueError(f"sequence {b} of input_ids is empty: attention_mask hides all of it")
    return mask
