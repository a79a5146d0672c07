"""Where the layers of a model lie, for what takes it apart."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

# What classes of models call their list of layers.
_LAYERS = ("layers", "h")


def layer_list_name(model: Any) -> str:
    """What the base model calls its list of layers."""
    return next(name for name in _LAYERS if name in model.base_model._modules)


def unknown_structure(model: Any) -> str | None:
    """Why this model cannot be taken apart, or None."""
    reason = unknown_forward(model)
    if reason is not None:
        return reason
    base = model.base_model
    if base is model or not any(
        isinstance(base._modules.get(name), torch.nn.ModuleList) for name in _LAYERS
    ):
        return f"its base model has no list of layers called {' or '.join(_LAYERS)}"
    return None


def unknown_forward(model: Any) -> str | None:
    """Why the forward of this model is not that of its class, or None."""
    if not isinstance(model, PreTrainedModel):
        return "it is a wrapper"
    if not isinstance(model.base_model, PreTrainedModel):
        return f"its base model is a wrapper, {type(model.base_model).__name__}"
    if any("forward" in vars(module) for module in (model, model.base_model)):
        return "its forward was replaced"
    return None
