"""Hidden states of the forwards through a cache, kept until the loop takes them."""

from __future__ import annotations

from typing import Any

import torch

HiddenStates = tuple[torch.Tensor, ...]


def keep_hidden_states(cache: Any, first: HiddenStates | None = None) -> None:
    """Let every later forward through a cache ask the model for its hidden states.

    Args:
        cache: any `RollbackCache`.
        first: those of a prefill that the model made itself.
    """
    rows = _rows_of(cache)
    for b, row in enumerate(rows):
        own = first if first is None or len(rows) == 1 else tuple(x[b : b + 1] for x in first)
        row.hidden_states = [] if own is None else [own]


def take_hidden_states(cache: Any) -> HiddenStates:
    """The hidden states of all forwards since the last call, one after the other.

    Returns:
        [B, n, H] for the embeddings and for each layer, in the order of the model.
    """
    rows = []
    for row in _rows_of(cache):
        rows.append([torch.cat(layers, dim=1) for layers in zip(*row.hidden_states, strict=True)])
        row.hidden_states = []
    return tuple(torch.cat(layers) for layers in zip(*rows, strict=True))


def _rows_of(cache: Any) -> list[Any]:
    """The cache itself, or those of sequences that run alone."""
    rows: list[Any] = getattr(cache, "rows", [cache])
    return rows
