"""The check that a target or drafter is a model of Transformers, or a wrapper around one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

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
