"""A ``DynamicCache`` that the model's own prefill filled, as a cache of the loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from specdec_hf.cache.model_call import run_model
from specdec_hf.cache.protocol import Lengths


class DynamicCacheAdapter:
    """One sequence in a ``DynamicCache``, rolled back with ``crop``.

    It takes over the prefill of inputs other than text where `SpecCache` cannot.
    """

    kind = "dynamic"

    def __init__(self, model: Any, cache: DynamicCache) -> None:
        self.model = model
        self.cache = cache
        self.cache.activate_past_recording()
        self.device: torch.device = model.device
        self.later_inputs: Any = None
        self.lengths: Lengths = np.array([self.cache.get_seq_length()], dtype=np.int64)

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Feed the next tokens; arguments and result as in `forward_window`."""
        return run_model(self.model, self, tokens, self.window(starts, tokens.shape[1]), keep)

    def window(self, starts: Lengths, size: int) -> dict[str, Any]:
        """Model inputs for the next ``size`` tokens; ``starts`` [1] must be the cache's length."""
        if starts[0] != self.lengths[0]:
            raise ValueError(
                f"DynamicCache holds {self.lengths[0]} tokens, asked to start at {starts[0]}"
            )
        start = int(starts[0])
        self.lengths = self.lengths + size
        return {
            "past_key_values": self.cache,
            "position_ids": torch.arange(start, start + size, device=self.device)[None],
        }

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[0]`` tokens."""
        # Even crop(0) has an effect: a sliding layer drops what left its window only in crop.
        self.cache.crop(-int(self.lengths[0] - lengths[0]))
        self.lengths = lengths.astype(np.int64, copy=True)

    def release(self) -> DynamicCache:
        """The cache as plain ``generate`` would leave it."""
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False
            # The layers hold inference tensors. A clone made outside inference mode is a normal
            # tensor, which the user may write into. A layer without a cache of its own holds None.
            if isinstance(getattr(layer, "keys", None), torch.Tensor):
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return self.cache
