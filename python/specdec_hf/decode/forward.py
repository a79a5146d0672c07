"""One pass of a model over the next tokens of every row, or over a tree of them."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch

from specdec_hf.cache.rows import Lengths, RowCache, SpecCache


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
    return _forward(model, tokens, cache.window(starts, tokens.shape[1]), keep)


def forward_tree(
    model: Any, cache: SpecCache, tokens: torch.Tensor, roots: Lengths, parents: torch.Tensor
) -> torch.Tensor:
    """Logits [B, n, V] of the last n of a tree's root and nodes; their entries are cached.

    Args:
        model: as in `forward_window`.
        cache: holds root and nodes afterwards, in the order of their numbers.
        tokens: [B, n] int64; the root comes first.
        roots: [B] position of each row's root.
        parents: [B, N] of all nodes; those that ``tokens`` leaves out are in the cache.
    """
    skip = parents.shape[1] + 1 - tokens.shape[1]
    return _forward(model, tokens, cache.tree_window(roots, parents, skip), tokens.shape[1])


def _forward(model: Any, tokens: torch.Tensor, inputs: dict[str, Any], keep: int) -> torch.Tensor:
    model_class: type = type(model)
    if _takes_logits_to_keep(model_class):
        inputs["logits_to_keep"] = keep
    output = model(input_ids=tokens, use_cache=True, return_dict=True, **inputs)
    logits: torch.Tensor = output.logits
    return logits if logits.shape[1] == keep else logits[:, -keep:]


@lru_cache(maxsize=64)
def _takes_logits_to_keep(model_class: type) -> bool:
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
