"""Conversion of caches: from the caller's ``past_key_values``, and to the one that is returned."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import (
    DynamicCache,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from specdec_hf.runner.choose import ChosenCache
from specdec_hf.runner.plain_runner import PlainRunner
from specdec_hf.runner.protocol import (
    Runner,
    caches_in,
    counts_tokens,
    decoder_cache,
    is_encoder_decoder,
    to_device,
)
from specdec_hf.runner.spec_cache import SpecCache
from specdec_hf.runner.spec_runner import SpecRunner


def import_cache(chosen: ChosenCache, past: Any, capacity: int) -> Runner:
    """A runner over a copy of the caller's ``past_key_values``; theirs is not changed.

    Its columns are the first of the prompt, of which it lacks one at least. A ValueError says what
    is wrong with it.
    """
    assert chosen.request.prompt is not None
    model, mask = chosen.model, chosen.request.prompt.mask
    if isinstance(past, SpecCache):
        own = mask[:, : _columns_of(past, mask)]
        past = _in_columns(model, past.spec_layers, _slots_of(own))
    if is_encoder_decoder(model):
        names, fits = "an EncoderDecoderCache", isinstance(past, EncoderDecoderCache)
    else:
        names, fits = "a DynamicCache or SpecCache", isinstance(past, DynamicCache)
    if not fits or not isinstance(decoder_cache(past), DynamicCache):
        raise ValueError(f"past_key_values must be {names}, got {type(past).__name__}")
    layers: list[Any] = decoder_cache(past).layers
    if not counts_tokens(past):
        raise ValueError(
            f"past_key_values of {type(model).__name__} is not supported: its layers keep states "
            "that do not say how many tokens they hold"
        )
    columns = past.get_seq_length()
    if columns >= mask.shape[1]:
        raise ValueError(
            f"past_key_values holds {columns} tokens, but input_ids has {mask.shape[1]} columns: "
            "pass the whole sequence, at least one token longer than the cache"
        )
    if columns == 0:
        return chosen.make(capacity)
    check_batch(layers, len(mask))
    runner = chosen.make(capacity, None if chosen.kind.has_slots else copy_of(past))
    if isinstance(runner, SpecRunner):
        fill(runner.cache, past, mask)
    return runner


def check_batch(layers: Sequence[Any], batch_size: int) -> None:
    """A ValueError where the layers of a cache hold another number of sequences."""
    held = (getattr(layer, "keys", None) for layer in layers)
    sizes = {len(keys) for keys in held if isinstance(keys, torch.Tensor) and keys.numel()}
    if sizes - {batch_size}:
        raise ValueError(
            f"past_key_values must hold {batch_size} sequences as input_ids does, got {max(sizes)}"
        )


def _columns_of(past: SpecCache, mask: NDArray[np.bool_]) -> int:
    """How many of the first columns of the input the cache holds; it stores no padding itself."""
    if len(past.lengths) != len(mask):
        raise ValueError(
            f"past_key_values must hold {len(mask)} sequences as input_ids does, "
            f"got {len(past.lengths)}"
        )
    before = np.pad(mask.cumsum(axis=1), ((0, 0), (1, 0)))  # [B, T + 1] tokens before each column
    columns = np.flatnonzero((before == past.lengths[:, None]).all(axis=0))
    if len(columns) == 0:
        raise ValueError(
            f"past_key_values holds {past.lengths.tolist()} tokens of the sequences, and the "
            "attention_mask has no first columns with as many: pass the sequences of the cache, "
            f"continued; its last column has {before[:, -1].tolist()}"
        )
    return int(columns[0])


def fill(cache: SpecCache, past: DynamicCache, mask: NDArray[np.bool_]) -> None:
    """Copy the keys and values of ``past`` into a cache; ``mask`` [B, P] hides padding of both."""
    columns = past.get_seq_length()
    lengths = mask[:, :columns].sum(axis=1).astype(np.int64)
    # A stable sort by "is padding" moves each sequence's tokens to the front, in order.
    order = torch.from_numpy(np.argsort(~mask[:, :columns], axis=1, kind="stable"))
    order = order.to(cache.device)[:, None, :, None]
    compact = bool((lengths == columns).all())

    def slots_of(x: torch.Tensor) -> torch.Tensor:
        # A sliding layer holds its last columns only; the mask hides the others for good.
        full = torch.nn.functional.pad(x.to(cache.device), (0, 0, columns - x.shape[2], 0))
        return full if compact else full.gather(2, order.expand(*full.shape[:2], -1, full.shape[3]))

    layers: list[Any] = past.layers
    cache.fill(
        [None if x.keys is None else (slots_of(x.keys), slots_of(x.values)) for x in layers],
        lengths,
    )


def export_cache(runner: Runner, mask: NDArray[np.bool_]) -> Any:
    """A ``DynamicCache`` whose columns are those of the returned sequences.

    It is the model's own cache or state where tokens cannot be moved in that, and None for a batch
    whose sequences ran one by one or a model without a cache. ``mask`` [B, P] says which columns
    hold a token; the last one of the returned sequences is lacking, as after plain ``generate``.
    """
    if isinstance(runner, SpecRunner):
        return _in_columns(runner.model, runner.cache.spec_layers, _slots_of(mask))
    if not isinstance(runner, PlainRunner):
        return None
    past = runner.release()
    from specdec_hf.extras.rollback_runner import AlignedRunner  # noqa: PLC0415  # rare

    if not isinstance(runner, AlignedRunner):
        own_tensors(past)
        return past
    # The prompt's mask may have holes, so a stable sort finds the column of each token.
    order = np.argsort(~runner.mask, axis=1, kind="stable")
    columns = np.take_along_axis(order, _slots_of(mask), axis=1)
    exported = _in_columns(runner.model, decoder_cache(past).layers, columns)
    if isinstance(past, EncoderDecoderCache):
        own_tensors(past.cross_attention_cache)
        return EncoderDecoderCache(exported, past.cross_attention_cache)
    return exported


def _slots_of(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[B, P], the number of the token in each column among those of its sequence."""
    numbers: NDArray[np.int64] = np.maximum(mask.cumsum(axis=1) - 1, 0)
    return numbers


def _in_columns(model: Any, sources: Sequence[Any], index: NDArray[np.int64]) -> DynamicCache:
    """Keys and values of layers in the order of columns [B, P], which name their slots."""
    columns = index.shape[1]
    exported = DynamicCache(config=model.config)
    layers: list[Any] = exported.layers
    slots = to_device(index, model.device)
    aligned = bool((index == np.arange(columns)).all())
    for source, target in zip(sources, layers, strict=False):
        if source.keys is None or source.keys.shape[2] == 0:
            continue  # a layer without a cache of its own
        entries = [
            x[:, :, :columns]
            if aligned
            else x.gather(
                2, slots.to(x.device)[:, None, :, None].expand(*x.shape[:2], columns, x.shape[3])
            )
            for x in (source.keys, source.values)
        ]
        if isinstance(target, DynamicSlidingWindowLayer):
            target.lazy_initialization(entries[0], entries[1])
            keep = min(target.sliding_window - 1, columns)
            target.keys, target.values = (x[:, :, columns - keep :].clone() for x in entries)
            target.cumulative_length = columns
        else:
            target.update(entries[0], entries[1])
    return exported


def copy_of(past: Any) -> Any:
    """A copy of a caller's cache that the model may extend without changing the caller's."""
    if isinstance(past, EncoderDecoderCache):
        return EncoderDecoderCache(*map(copy_of, caches_in(past)))
    if not past.is_croppable:
        return copy.deepcopy(past)
    fresh = copy.copy(past)
    fresh.layers = [copy.copy(layer) for layer in past.layers]
    for layer in fresh.layers:  # which rebind keys and values and never write into them
        _clone_states(layer)
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


def _clone_states(layer: Any) -> None:
    """Give a layer its own states of a convolution or recurrence.

    They lie in dicts, and a forward of one token writes into them.
    """
    for name, value in list(vars(layer).items()):
        if isinstance(value, dict):
            states = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in value.items()}
            setattr(layer, name, states)
