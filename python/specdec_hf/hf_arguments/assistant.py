"""Arguments by which ``model.generate`` asks for drafts: a draft model, or prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from specdec_hf.arguments import shown
from specdec_hf.hf_arguments.unsupported import Origin
from specdec_hf.schedules.confidence import DEFAULT_THRESHOLD

# Transformers' own defaults, which no caller asked for.
DEFAULTS = {"num_assistant_tokens": (None, 20), "num_assistant_tokens_schedule": (None, "constant")}


@dataclass
class Assistant:
    """The drafts that the arguments of ``model.generate`` ask for.

    Attributes:
        model: ``assistant_model``, or None.
        tokenizer: ``assistant_tokenizer``, that of a draft model of another vocabulary, or None.
        target_tokenizer: ``tokenizer``, or None.
        lookup: whether ``prompt_lookup_num_tokens`` asks for prompt lookup.
        max_ngram: ``max_matching_ngram_size``, or None.
        num_assistant_tokens: tokens to draft per round, or None.
        schedule: ``num_assistant_tokens_schedule``, or None.
        from_model: whether they are defaults of the model's own generation config, which the
            arguments of the loop overrule.
        confidence_threshold: ``assistant_confidence_threshold``, or None.
    """

    model: Any = None
    tokenizer: Any = None
    target_tokenizer: Any = None
    lookup: bool = False
    max_ngram: int | None = None
    num_assistant_tokens: int | None = None
    schedule: str | None = None
    from_model: bool = False
    confidence_threshold: float | None = None


def assistant_of(
    config: GenerationConfig,
    origin: Origin,
    model: Any = None,
    tokenizer: Any = None,
    target_tokenizer: Any = None,
) -> Assistant:
    """Read a complete generation config.

    Args:
        config: the config of the call.
        origin: where its values come from.
        model: ``assistant_model``.
        tokenizer: ``assistant_tokenizer``.
        target_tokenizer: ``tokenizer``.

    Raises:
        TypeError: an assistant model that is no model.
        ValueError: an assistant model and prompt lookup at once.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"assistant_model must be a model, got {shown(model)}")
    wanted = {
        name: None if getattr(config, name, None) in default else getattr(config, name)
        for name, default in DEFAULTS.items()
    }
    lookup = config.prompt_lookup_num_tokens
    if lookup is not None and model is not None:
        raise ValueError("assistant_model and prompt_lookup_num_tokens must not both be given")
    schedule = wanted["num_assistant_tokens_schedule"]
    number = wanted["num_assistant_tokens"]
    return Assistant(
        model=model,
        tokenizer=tokenizer,
        target_tokenizer=target_tokenizer,
        lookup=lookup is not None,
        max_ngram=config.max_matching_ngram_size,
        num_assistant_tokens=number if lookup is None else lookup,
        schedule=schedule,
        from_model=lookup is None and bool(origin.of("num_assistant_tokens", number)),
        confidence_threshold=_confidence_threshold(config, origin),
    )


def _confidence_threshold(config: GenerationConfig, origin: Origin) -> float | None:
    """Transformers' default of 0.4 counts only where the call itself gives it; 0 asks for none."""
    value = getattr(config, "assistant_confidence_threshold", None)
    if value == DEFAULT_THRESHOLD and "assistant_confidence_threshold" not in origin.given:
        return None
    return value or None
