"""One call of the model's forward with the ids, positions and mask that a cache made."""

from __future__ import annotations

import inspect
from collections.abc import Set
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES


def run_inputs(model: Any, inputs: dict[str, Any], keep: int) -> torch.Tensor:
    """Logits [B, keep, V] of the last tokens of a forward with these inputs and no others."""
    if "logits_to_keep" in forward_arguments(model):
        inputs = {**inputs, "logits_to_keep": keep}
    logits: torch.Tensor = model(use_cache=True, return_dict=True, **inputs).logits
    return logits[:, -keep:]


def run_embeddings(
    model: Any, runner: Any, embeddings: torch.Tensor, starts: NDArray[np.int64], keep: int
) -> torch.Tensor:
    """As `SpecRunner.forward`, for tokens given as embeddings [B, n, H]."""
    inputs = runner.window(starts, embeddings.shape[1])
    return run_inputs(model, {"inputs_embeds": embeddings, **inputs}, keep)


def model_inside(model: Any) -> Any:
    """The model that a wrapper such as a compiled or a PEFT model forwards to, or the model itself.

    Wrappers pass on arguments that the signature of their own forward does not name.
    """
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)


def forward_arguments(model: Any) -> Set[str]:
    """Names of the arguments that the forward of a model, or of the model inside, takes."""
    return inspect.signature(model_inside(model).forward).parameters.keys()


def keeps_cache(model: Any) -> bool:
    """Whether the model's forward takes any cache at all."""
    return not forward_arguments(model).isdisjoint(ALL_CACHE_NAMES)
