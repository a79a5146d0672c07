"""Conversion of caches: from the caller's ``past_key_values``, and to the one that is returned."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from specdec_hf.cache.dynamic_cache import DynamicCacheAdapter
from specdec_hf.cache.make import make_cache
from specdec_hf.cache.protocol import RollbackCache
from specdec_hf.cache.spec_cache import SpecCache


def import_cache(
    model: Any, past: Any, mask: NDArray[np.bool_], capacity: int, kind: str = "auto"
) -> RollbackCache:
    """A copy of the caller's ``past_key_values`` as a cache of the loop; theirs is not changed.

    Args:
        model: the model that filled ``past``.
        past: a ``DynamicCache`` or `SpecCache` whose columns are the first P columns of the input.
        mask: [B, T] bool, the attention mask of the whole input, False where it is padding.
        capacity: slots to allocate.
        kind: as in `make_cache`.

    Raises:
        ValueError: another kind of cache, another batch size, or no token beyond the cache.
    """
    if isinstance(past, SpecCache):
        past = export_cache(model, past, np.arange(past.lengths.max()) < past.lengths[:, None])
    if not isinstance(past, DynamicCache):
        raise ValueError(
            f"past_key_values must be a DynamicCache or SpecCache, got {type(past).__name__}"
        )
    columns = past.get_seq_length()
    if columns >= mask.shape[1]:
        raise ValueError(
            f"past_key_values holds {columns} tokens, but input_ids has {mask.shape[1]} columns: "
            "pass the whole sequence, at least one token longer than the cache"
        )
    batch_size = mask.shape[0]
    cache = make_cache(model, batch_size, capacity, kind)
    if columns == 0:
        return cache
    layers: list[Any] = past.layers
    held = next(layer.keys for layer in layers if layer.is_initialized)
    if held.shape[0] != batch_size:
        raise ValueError(
            f"past_key_values has {held.shape[0]} sequences, input_ids has {batch_size}"
        )
    lengths = mask[:, :columns].sum(axis=1).astype(np.int64)
    if isinstance(cache, DynamicCacheAdapter):
        if lengths[0] != columns:
            raise ValueError(
                "cache='dynamic' cannot drop padding from past_key_values; use cache='spec'"
            )
        # Layers rebind keys and values and never write into them: a shallow copy is enough.
        fresh = copy.copy(past)
        fresh.layers = [copy.copy(layer) for layer in past.layers]
        return DynamicCacheAdapter(model, fresh)
    assert isinstance(cache, SpecCache)
    # A stable sort by "is padding" moves each sequence's tokens to the front, in order.
    order = torch.from_numpy(np.argsort(~mask[:, :columns], axis=1, kind="stable"))
    order = order.to(model.device)[:, None, :, None]
    compact = bool((lengths == columns).all())

    def slots_of(x: torch.Tensor) -> torch.Tensor:
        # A sliding layer holds its last columns only; the mask hides the others for good.
        full = torch.nn.functional.pad(x.to(model.device), (0, 0, columns - x.shape[2], 0))
        return full if compact else full.gather(2, order.expand_as(full))

    entries = [(slots_of(layer.keys), slots_of(layer.values)) for layer in layers]
    cache.fill(entries, lengths)
    return cache


def export_cache(model: Any, cache: RollbackCache, mask: NDArray[np.bool_]) -> DynamicCache:
    """A ``DynamicCache`` whose columns are those of the returned sequences.

    Args:
        model: the model that filled ``cache``.
        cache: holds at least ``mask[b].sum()`` tokens of sequence ``b``.
        mask: [B, P] bool, which columns hold a token. The cache lacks the last column of the
            returned sequences, as after plain ``generate``.
    """
    if isinstance(cache, DynamicCacheAdapter):
        return cache.release()
    assert isinstance(cache, SpecCache)
    columns = mask.shape[1]
    exported = DynamicCache(config=model.config)
    layers: list[Any] = exported.layers
    slots = torch.from_numpy(np.maximum(mask.cumsum(axis=1) - 1, 0)).to(model.device)  # [B, P]
    aligned = bool(mask.any(axis=0).all()) and bool((mask[:, :-1] >= mask[:, 1:]).all())
    for source, target in zip(cache.spec_layers, layers, strict=True):
        entries = [
            x[:, :, :columns]
            if aligned
            else x.gather(
                2, slots.to(x.device)[:, None, :, None].expand(*x.shape[:2], columns, x.shape[3])
            )
            for x in source.buffers
        ]
        if isinstance(target, DynamicSlidingWindowLayer):
            target.lazy_initialization(entries[0], entries[1])
            keep = min(target.sliding_window - 1, columns)
            target.keys, target.values = (x[:, :, columns - keep :] for x in entries)
            target.cumulative_length = columns
        else:
            target.update(entries[0], entries[1])
    return exported
