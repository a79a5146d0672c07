"""Runners over Transformers' own cache that roll it back, for models that refuse ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from specdec_hf.runner.plain_runner import PlainRunner, RollbackRunner
from specdec_hf.runner.protocol import (
    CACHE_NAME,
    HiddenStateTap,
    Lengths,
    Runner,
    decoder_cache,
    to_device,
)
from specdec_kernels import kv_realign_


class DynamicRunner(RollbackRunner):
    """Runs one sequence, rolled back with ``crop``. Its left padding stays where it was."""

    kind = "dynamic"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache.activate_past_recording()

    def _begin_cache(self, batch_size: int) -> None:
        if self._of_decoder:
            super()._begin_cache(batch_size)
            return
        # A sliding layer drops what left its window, so its tokens cannot be moved, and several
        # drafts cannot be forgotten. Layers without a window keep all tokens, and the model's
        # own mask hides the same ones.
        fresh: Cache = DynamicCache(config=self.model.config)
        fresh.layers = [
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer
            for layer in fresh.layers
        ]
        self._kwargs[CACHE_NAME] = fresh


class AlignedRunner(DynamicRunner):
    """Runs several sequences that share one cache.

    After a round in which they kept different numbers of drafts, `kv_realign_` moves the tokens of
    each to the right, until all end in one column again. Of a prompt whose ``past`` has sliding
    layers, which dropped tokens, all is read again.
    """

    kind = "aligned"

    def __init__(self, *args: Any, past: Cache | None = None, **kwargs: Any) -> None:
        layers: list[Any] = [] if past is None else decoder_cache(past).layers
        if any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers):
            past = None
        super().__init__(*args, past=past, **kwargs)
        # The first roll back may realign in place, before a forward rebinds these tensors.
        for layer in decoder_cache(self.cache).layers:
            if isinstance(getattr(layer, "keys", None), torch.Tensor):
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def _begin_cache(self, batch_size: int) -> None:
        fresh: Cache = DynamicCache()
        if self._of_decoder:
            fresh = EncoderDecoderCache(fresh, DynamicCache())
        self._kwargs[CACHE_NAME] = fresh

    def _extend_inputs(self, size: int, first: bool) -> None:
        super()._extend_inputs(size, first)
        if self._of_decoder and self._positions_name in self._takes:
            # Plain generation leaves them out, because it never moves a sequence to the right.
            hides = self._keep_mask or not self.mask.all()
            held = to_device(self.mask.cumsum(axis=1) - 1, self._ids.device)
            self._kwargs[self._positions_name] = held.clamp(min=0) if hides else None

    def _new_columns(self, starts: Lengths, ends: Lengths) -> tuple[int, Lengths]:
        width = int((ends - starts).max())
        shifts: Lengths = width - ends
        if shifts.any():
            self._realign(starts, ends, shifts)
        return width, shifts

    def _realign(self, starts: Lengths, ends: Lengths, shifts: Lengths) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for layer in decoder_cache(self.cache).layers:
            if layer.is_initialized and layer.keys is not None:
                by_device.setdefault(layer.keys.device, []).extend((layer.keys, layer.values))
        for device, buffers in by_device.items():
            where = (to_device(x, device) for x in (starts, ends - starts, shifts))
            kv_realign_(buffers, *where)


class SeparateRunner(Runner):
    """Runs the sequences of a batch alone, one forward after the other.

    This serves models for which a sequence of a batch depends on its padding. Each sequence keeps
    the padding it was given, so its text is that of plain ``generate``.

    Args:
        runners: a `PlainRunner` of one sequence each.
    """

    def __init__(self, runners: list[PlainRunner]) -> None:
        self.runners = runners
        self.kind, self.model = runners[0].kind, runners[0].model
        self.tap = HiddenStateTap()

    @property
    def lengths(self) -> Lengths:
        """[B] int64, committed tokens of each sequence that the caches hold."""
        return np.concatenate([runner.lengths for runner in self.runners])

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Feed the next tokens of every sequence, as in `Runner`."""
        logits, hidden = [], []
        for b, runner in enumerate(self.runners):
            if self.tap.is_open:
                runner.tap.open(self.tap.layers)
            logits.append(runner.forward(tokens[b : b + 1], starts[b : b + 1], keep))
            hidden.append(runner.tap.pop())
        if self.tap.is_open:
            self.tap.add({layer: torch.cat([one[layer] for one in hidden]) for layer in hidden[0]})
        return torch.cat(logits)

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of each sequence."""
        for runner, length in zip(self.runners, lengths, strict=True):
            runner.truncate(np.array([length]))
