"""One call of the model's forward with the ids, positions and mask that a cache made."""

from __future__ import annotations

import inspect
from collections.abc import Set
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES

from specdec_hf.cache.hidden_states import add_hidden_states


def run_model(
    model: Any, cache: Any, tokens: torch.Tensor, inputs: dict[str, Any], keep: int
) -> torch.Tensor:
    """Logits [B, keep, V] of the last tokens of ``tokens`` [B, n], with a cache's ``inputs``."""
    if cache.later_inputs is not None:
        inputs = cache.later_inputs.add_to(inputs, tokens.shape[1])
    model_class: type = type(model_inside(model))
    if _takes_logits_to_keep(model_class):
        inputs["logits_to_keep"] = keep
    if cache.hidden_states is not None:
        inputs["output_hidden_states"] = True
    forward = model
    if cache.policy.compiled is not None and cache.runs_compiled(tokens.shape[1]):
        forward = cache.policy.compiled
    output = forward(input_ids=tokens, use_cache=True, return_dict=True, **inputs)
    if cache.hidden_states is not None:
        add_hidden_states(cache, output.hidden_states)
    logits: torch.Tensor = output.logits
    return logits if logits.shape[1] == keep else logits[:, -keep:]


def run_inputs(model: Any, inputs: dict[str, Any], keep: int) -> torch.Tensor:
    """Logits [B, keep, V] of the last tokens of a forward with these inputs and no others."""
    if "logits_to_keep" in forward_arguments(model):
        inputs = {**inputs, "logits_to_keep": keep}
    logits: torch.Tensor = model(use_cache=True, return_dict=True, **inputs).logits
    return logits[:, -keep:]


def run_embeddings(
    model: Any, cache: Any, embeddings: torch.Tensor, starts: NDArray[np.int64], keep: int
) -> torch.Tensor:
    """As `RollbackCache.forward` of a `SpecCache`, for tokens given as embeddings [B, n, H]."""
    inputs = cache.window(starts, embeddings.shape[1])
    return run_inputs(model, {"inputs_embeds": embeddings, **inputs}, keep)


def model_inside(model: Any) -> Any:
    """The model that a wrapper such as a compiled or a PEFT model forwards to, or the model itself.

    Wrappers pass on arguments that the signature of their own forward does not name.
    """
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)


def forward_arguments(model: Any) -> Set[str]:
    """Names of the arguments that the forward of a model, or of the model inside, takes."""
    return inspect.signature(model_inside(model).forward).parameters.keys()


@lru_cache(maxsize=64)
def _takes_logits_to_keep(model_class: type) -> bool:
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]


def keeps_cache(model: Any) -> bool:
    """Whether the model's forward takes any cache at all."""
    return not forward_arguments(model).isdisjoint(ALL_CACHE_NAMES)
