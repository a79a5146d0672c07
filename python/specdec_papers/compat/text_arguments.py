"""What all functions of the room take: a model, a prompt and its ends, a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from specdec_hf.arguments import check_integer, check_integers, is_integer, shown
from specdec_hf.request.entry import has_own_generate
from specdec_hf.request.inputs import check_language_model
from specdec_hf.runner.protocol import is_encoder_decoder


def check_model(name: str, model: Any) -> None:
    """Raises TypeError or ValueError for what is no decoder-only language model, by name."""
    check_language_model(name, model)
    if is_encoder_decoder(model) or has_own_generate(model):
        raise ValueError(
            f"{name} must be a decoder-only model with the generate of Transformers, got "
            f"{type(model).__name__}"
        )


def check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            f"tokenizer must be None or an object with decode(), got {shown(tokenizer)}"
        )


def text_arguments(
    model: Any, inputs: Sequence[int], max_gen_len: int, eos_tokens_id: Any, pad_token_id: int
) -> dict[str, Any]:
    """Prompt and ends of a text as arguments of `generate`.

    Raises:
        TypeError, ValueError: a wrong one, by name.
    """
    ids = check_integers("inputs", inputs, 0)
    if not ids:
        raise ValueError("inputs must have at least one token, got none")
    given = [eos_tokens_id] if is_integer(eos_tokens_id) else eos_tokens_id
    eos = check_integers("eos_tokens_id", given, 0)
    if not eos:
        raise ValueError("eos_tokens_id must have at least one id, got none")
    prompt = torch.tensor([ids], device=model.device)
    return {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": check_integer("max_gen_len", max_gen_len, 1),
        "eos_token_id": list(eos),
        "pad_token_id": check_integer("pad_token_id", pad_token_id, 0),
    }


def readable(tokenizer: Any, tokens: list[int]) -> str:
    return repr(tokens if tokenizer is None else tokenizer.decode(tokens))
