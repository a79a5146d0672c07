"""Checks of models and their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from specdec_hf.runner.protocol import CACHE_NAME, vocab_size_of

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

RULE = "a causal language model of Transformers, or a wrapper that forwards to one"


def is_language_model(model: Any) -> bool:
    """Whether a model generates text by itself.

    ``torch.compile`` and PEFT wrap a `PreTrainedModel` in a module of another type, which has the
    attributes of the model inside.
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(
        getattr(model, "config", None), PreTrainedConfig
    ):
        return False
    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        return False
    return bool(getattr(model, "can_generate", bool)())


def check_language_model(name: str, model: Any) -> None:
    """Raises TypeError for an argument that is no such model, and ValueError for prompt tuning."""
    if not is_language_model(model):
        got = type(model).__name__ if isinstance(model, torch.nn.Module) else repr(model)
        raise TypeError(f"{name} must be {RULE}, got {got}")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{name} must have no virtual tokens, got {type(model).__name__}, whose forward puts "
            "those of its prompt tuning before every window"
        )


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


def check_prompts(
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
) -> None:
    """Raises what ``model.generate`` would fail at: no tensor, no prompt, or a wrong shape."""
    check_tensor("input_ids", input_ids)
    check_tensor("attention_mask", attention_mask)
    check_tensor("inputs_embeds", inputs_embeds)
    prompts = input_ids if inputs_embeds is None else inputs_embeds
    if prompts is None:
        raise ValueError("input_ids is required")
    if input_ids is not None and input_ids.ndim != 2:
        raise ValueError(f"input_ids must be [B, T], got shape {list(input_ids.shape)}")
    if attention_mask is not None and attention_mask.shape != prompts.shape[:2]:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {list(prompts.shape[:2])}, "
            f"got {list(attention_mask.shape)}"
        )


def read_input_ids(
    model: Any, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None
) -> torch.Tensor:
    """``input_ids`` [B, T] as int64 on the host; T is 0 with ``inputs_embeds`` alone.

    Raises:
        ValueError: an empty prompt, a wrong shape, dtype or id.
    """
    if inputs_embeds is not None:
        if inputs_embeds.ndim != 3:
            raise ValueError(
                f"inputs_embeds must be [B, T, hidden], got shape {list(inputs_embeds.shape)}"
            )
        if input_ids.numel() == 0:
            return torch.zeros((inputs_embeds.shape[0], 0), dtype=torch.int64, device="cpu")
        if input_ids.shape != inputs_embeds.shape[:2]:
            raise ValueError(
                f"input_ids must be [B, T] = {list(inputs_embeds.shape[:2])} as inputs_embeds, "
                f"got {list(input_ids.shape)}"
            )
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


def check_decoder_mask(ids: torch.Tensor, model_kwargs: dict[str, Any]) -> NDArray[np.bool_]:
    """``decoder_attention_mask`` [B, T] as bool on the host; None hides nothing.

    Args:
        ids: [B, T] int64, those of the decoder.
        model_kwargs: may hold the mask, and the caller's cache.

    Raises:
        TypeError: no tensor.
        ValueError: wrong shape, a hidden column that is not on the left, or no mask with a cache of
            the caller.
    """
    given = model_kwargs.get("decoder_attention_mask")
    check_tensor("decoder_attention_mask", given)
    if given is None:
        past = model_kwargs.get(CACHE_NAME)
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
