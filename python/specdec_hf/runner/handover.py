"""Conversion of caches: from the caller's ``past_key_values``, and to the one that is returned."""

from __future__ import annotations

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

from specdec_hf.runner.choose import ChosenKind, choose_runner
from specdec_hf.runner.encoded import counts_tokens, decoder_cache, is_encoder_decoder
from specdec_hf.runner.later_inputs import LaterInputs
from specdec_hf.runner.make import kind_reason
from specdec_hf.runner.plain_runner import PlainRunner, Prompt, SeparateRunner, own_tensors
from specdec_hf.runner.protocol import Runner, to_device
from specdec_hf.runner.spec_cache import SpecCache
from specdec_hf.runner.spec_runner import SpecRunner


def import_cache(
    model: Any,
    past: Any,
    prompt: Prompt,
    capacity: int,
    kind: str | ChosenKind = "auto",
    **options: Any,
) -> tuple[Runner, list[str]]:
    """A runner over a copy of the caller's ``past_key_values``; theirs is not changed.

    Args:
        model: the model that filled ``past``.
        past: a ``DynamicCache`` or `SpecCache` whose columns are the first P columns of the input;
            of an encoder-decoder an ``EncoderDecoderCache``.
        prompt: the whole input.
        capacity, kind, options: as in `choose_runner`, whose result this is.

    Raises:
        ValueError: another kind of cache, another batch size, a `SpecCache` of other columns, or no
            token beyond the cache.
    """
    mask = prompt.mask
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
    batch_size = mask.shape[0]
    if columns == 0:
        return choose_runner(model, batch_size, capacity, kind, prompt=prompt, **options)
    check_batch(layers, batch_size)
    runner, notes = choose_runner(
        model, batch_size, capacity, kind, prompt=prompt, past=past, **options
    )
    if isinstance(runner, SpecRunner):
        _fill(runner.cache, past, mask)
    return runner, notes


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


def take_over(
    model: Any, past: Any, mask: NDArray[np.bool_], capacity: int, later_inputs: LaterInputs
) -> SpecRunner:
    """A runner over a copy of the cache that the model's own prefill filled.

    Args:
        model: the model that filled ``past``.
        past: a ``DynamicCache`` of P columns.
        mask: [B, P], False where a column is padding.
        capacity: slots to allocate.
        later_inputs: as in `SpecRunner`.

    Raises:
        ValueError: a model that this cache cannot serve, or another kind of ``past``.
    """
    if not isinstance(past, DynamicCache):
        raise ValueError(f"past_key_values must be a DynamicCache, got {type(past).__name__}")
    reason = kind_reason(model, "spec")
    if reason is not None:
        raise ValueError(f"cache='spec' cannot serve {type(model).__name__}: {reason}")
    runner = SpecRunner(model, len(mask), capacity, later_inputs=later_inputs)
    _fill(runner.cache, past, mask)
    return runner


def _fill(cache: SpecCache, past: DynamicCache, mask: NDArray[np.bool_]) -> None:
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


def export_cache(model: Any, runner: Runner, mask: NDArray[np.bool_]) -> Any:
    """A ``DynamicCache`` whose columns are those of the returned sequences.

    It is the model's own cache or state where tokens cannot be moved in that, and None for a batch
    whose sequences ran one by one or a model without a cache.

    Args:
        model: the model that filled the cache.
        runner: its cache holds at least ``mask[b].sum()`` tokens of sequence ``b``.
        mask: [B, P] bool, which columns hold a token. The cache lacks the last column of the
            returned sequences, as after plain ``generate``.
    """
    if isinstance(runner, SeparateRunner):
        return runner.runners[0].release() if len(runner.runners) == 1 else None
    if isinstance(runner, SpecRunner):
        return _in_columns(model, runner.cache.spec_layers, _slots_of(mask))
    assert isinstance(runner, PlainRunner)
    if runner.kind != "aligned":
        return runner.release()
    runner.align()
    # The prompt's mask may have holes, so a stable sort finds the column of each token.
    order = np.argsort(~runner.mask, axis=1, kind="stable")
    columns = np.take_along_axis(order, _slots_of(mask), axis=1)
    exported = _in_columns(model, decoder_cache(runner.cache).layers, columns)
    if isinstance(runner.cache, EncoderDecoderCache):
        crossed = runner.cache.cross_attention_cache
        own_tensors(crossed)
        return EncoderDecoderCache(exported, crossed)
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
