"""Copies of Transformers' caches, so that no two users write into the same tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from specdec_hf.cache.encoded import caches_in


def copy_of(past: Any) -> Any:
    """A copy of a caller's cache that the model may extend without changing the caller's."""
    if isinstance(past, EncoderDecoderCache):
        return EncoderDecoderCache(*map(copy_of, caches_in(past)))
    if not past.is_croppable:
        return copy.deepcopy(past)
    fresh = copy.copy(past)
    fresh.layers = [_copy_of_layer(layer) for layer in past.layers]
    return fresh


def own_tensors(cache: Any) -> None:
    """Make a cache one that its user may write into, as plain ``generate`` leaves it."""
    for part in caches_in(cache):
        for layer in getattr(part, "layers", ()):
            if hasattr(layer, "record_past"):
                layer.record_past = False
            # The layers hold inference tensors. A clone made outside inference mode is a normal
            # tensor. A layer without a cache of its own holds None.
            if isinstance(getattr(layer, "keys", None), torch.Tensor):
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            _clone_states(layer)


def _copy_of_layer(layer: Any) -> Any:
    # Layers rebind keys and values and never write into them.
    fresh = copy.copy(layer)
    _clone_states(fresh)
    return fresh


def _clone_states(layer: Any) -> None:
    """Give a layer its own states of a convolution or recurrence.

    They lie in dicts, and a forward of one token writes into them.
    """
    for name, value in list(vars(layer).items()):
        if isinstance(value, dict):
            states = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in value.items()}
            setattr(layer, name, states)
