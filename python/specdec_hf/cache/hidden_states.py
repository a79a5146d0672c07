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
    caches = _caches_in(cache)
    for b, one in enumerate(caches):
        own = first if first is None or len(caches) == 1 else tuple(x[b : b + 1] for x in first)
        one.hidden_states = [] if own is None else [own]


def take_hidden_states(cache: Any) -> HiddenStates:
    """The hidden states of all forwards since the last call, one after the other.

    Returns:
        [B, n, H] for the embeddings and for each layer, in the order of the model.
    """
    taken = []
    for one in _caches_in(cache):
        taken.append([torch.cat(layers, dim=1) for layers in zip(*one.hidden_states, strict=True)])
        one.hidden_states = []
    return tuple(torch.cat(layers) for layers in zip(*taken, strict=True))


def _caches_in(cache: Any) -> list[Any]:
    """The cache itself, or those of sequences that run alone."""
    caches: list[Any] = getattr(cache, "caches", [cache])
    return caches
