"""One pass of a model over the next tokens of every row."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch

from specdec_hf.cache import Lengths, RowCache


def forward_window(
    model: Any, cache: RowCache, tokens: torch.Tensor, starts: Lengths, keep: int
) -> torch.Tensor:
    """Logits [B, keep, V] of the last ``keep`` of the ``tokens`` [B, n]; their entries are cached.

    Args:
        model: causal LM, called through its unmodified forward.
        cache: row cache; holds ``starts[b] + n`` tokens of row ``b`` afterwards.
        tokens: [B, n] int64 on the model's device.
        starts: [B] position of each row's first token; negative positions are left padding.
        keep: rows of logits wanted, counted from the end.
    """
    inputs = cache.window(starts, tokens.shape[1])
    model_class: type = type(model)
    if _takes_logits_to_keep(model_class):
        inputs["logits_to_keep"] = keep
    output = model(input_ids=tokens, use_cache=True, return_dict=True, **inputs)
    logits: torch.Tensor = output.logits
    return logits if logits.shape[1] == keep else logits[:, -keep:]


@lru_cache(maxsize=64)
def _takes_logits_to_keep(model_class: type) -> bool:
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
