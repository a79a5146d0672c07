"""Hidden states of the forwards through a cache, kept until the loop takes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

# By the number of layers before them: 0 is the embeddings.
HiddenStates = dict[int, torch.Tensor]


def keep_hidden_states(
    cache: Any,
    layers: Collection[int] | None = None,
    first: Sequence[torch.Tensor] | None = None,
) -> None:
    """Let every later forward through a cache ask the model for its hidden states.

    What an earlier call asked for is kept, too.

    Args:
        cache: any `RollbackCache`.
        layers: after how many layers the states are to be kept; None keeps all.
        first: all of those of a prefill that the model made itself.
    """
    caches = _caches_in(cache)
    for b, one in enumerate(caches):
        before = one.hidden_layers if one.hidden_states is not None else frozenset()
        both = None if layers is None or before is None else before | frozenset(layers)
        one.hidden_layers = both
        if one.hidden_states is None:
            one.hidden_states = []
        if first is not None:
            own = first if len(caches) == 1 else [x[b : b + 1] for x in first]
            add_hidden_states(one, own)


def add_hidden_states(cache: Any, states: Sequence[torch.Tensor] | HiddenStates) -> None:
    """Keep what was asked for of one forward.

    Args:
        cache: of the forward.
        states: [B, n, H] of the embeddings and of each layer, or those that were asked for.
    """
    layers = range(len(states)) if cache.hidden_layers is None else cache.hidden_layers
    cache.hidden_states.append({layer: states[layer] for layer in layers})


def take_hidden_states(cache: Any) -> HiddenStates:
    """The hidden states [B, n, H] of all forwards since the last call, one after the other.

    It is empty where none are kept, or none were made.
    """
    taken: list[HiddenStates] = []
    for one in _caches_in(cache):
        if not one.hidden_states:
            return {}
        made, one.hidden_states = one.hidden_states, []
        joined = made[0]
        if len(made) > 1:
            joined = {n: torch.cat([states[n] for states in made], dim=1) for n in made[0]}
        taken.append(joined)
    if len(taken) == 1:
        return taken[0]
    return {n: torch.cat([states[n] for states in taken]) for n in taken[0]}


def _caches_in(cache: Any) -> list[Any]:
    """The cache itself, or those of sequences that run alone."""
    caches: list[Any] = getattr(cache, "caches", [cache])
    return caches
