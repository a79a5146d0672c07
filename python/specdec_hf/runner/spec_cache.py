"""A cache for batches whose sequences have different lengths.

A forward writes keys and values where the cache's cursor points. Truncation moves no data: it
lowers a length, and the next forward overwrites the slots after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from specdec_hf.runner.protocol import Lengths
from specdec_kernels import kv_append_, kv_compact_


class Cursor:
    """Where the next forward writes, and how many slots it sees; all layers share one object.

    Attributes:
        starts: [B], slot of each sequence's first new token.
        past: the largest of them on the host: how many tokens precede the forward's. Models that
            take no position ids count on from it.
        visible: slots that the forward sees, its own tokens included.
        capacity: slots that are allocated.
    """

    def __init__(self) -> None:
        self.starts: torch.Tensor = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.past = 0
        self.visible = 0
        self.capacity = 0


class SpecLayer(CacheLayerMixin):
    """One layer's buffers [B, H, S, D]; token ``j`` of a forward goes to slot ``starts[b] + j``."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cursor = cursor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # The buffers start as zeros because attention multiplies masked slots by a weight of 0, and
        # 0 * NaN is NaN. They are made outside inference mode because the user may write into the
        # returned cache.
        with torch.inference_mode(False):
            self.keys, self.values = (
                torch.zeros(
                    (*x.shape[:2], self.cursor.capacity, x.shape[3]), dtype=x.dtype, device=x.device
                )
                for x in (key_states, value_states)
            )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers
        # Layers of one model may live on several devices.
        starts = self.cursor.starts.to(key_states.device)
        kv_append_([keys, values], [key_states, value_states], starts)
        visible = self.cursor.visible
        return keys[:, :, :visible], values[:, :, :visible]

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, H, S, D]. Raises before the first update."""
        if self.keys is None or self.values is None:
            raise RuntimeError("the cache layer is empty")
        return self.keys, self.values

    def grow(self, capacity: int) -> None:
        """Move the buffers into larger ones of ``capacity`` slots, if they are smaller."""
        if self.is_initialized and self.buffers[0].shape[2] < capacity:
            with torch.inference_mode(False):
                self.keys, self.values = (
                    torch.nn.functional.pad(x, (0, 0, 0, capacity - x.shape[2]))
                    for x in self.buffers
                )

    def move_to(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Move into buffers that are large enough, whose other slots become zero."""
        for new, old in ((keys, self.keys), (values, self.values)):
            new.zero_()
            if old is not None:
                new[:, :, : old.shape[2]] = old
        self.keys, self.values, self.is_initialized = keys, values, True

    def drop(self) -> None:
        """Hold no buffers any more."""
        self.keys, self.values, self.is_initialized = None, None, False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.visible, 0

    def get_seq_length(self) -> int:
        return self.cursor.past

    def get_max_length(self) -> int:
        return -1


class SpecCache(Cache):
    """Key and value buffers for a whole batch, with one length per sequence.

    Token ``t`` of a sequence lies in slot ``t``; left padding is never stored.

    Args:
        config: the model's.
        batch_size: number of sequences B.
        capacity: slots S to allocate at first; the buffers grow when needed.
        device: the model's.

    Attributes:
        lengths: [B], tokens that each sequence has in the cache.
        cursor: where the forward under way writes.
    """

    def __init__(self, config: Any, batch_size: int, capacity: int, device: torch.device) -> None:
        self.cursor = Cursor()
        self.cursor.capacity = capacity
        layer_types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        self.spec_layers = [SpecLayer(self.cursor) for _ in layer_types]
        super().__init__(layers=list(self.spec_layers))
        self.lengths: Lengths = np.zeros(batch_size, dtype=np.int64)
        self.device = device

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cursor.past

    def move_cursor(self, starts: torch.Tensor, past: int, visible: int) -> None:
        """Tell all layers which slots the next forward writes and sees."""
        if visible >= self.cursor.capacity:
            # One slot stays unseen: a graph is made again where a forward sees all of a buffer.
            self.grow(max(visible + 1, self.cursor.capacity + self.cursor.capacity // 2))
        self.cursor.starts = starts
        self.cursor.past = max(past, 0)
        self.cursor.visible = visible

    def extend(self, ends: Lengths) -> None:
        """Count what the next forward writes, up to ``ends[b]`` tokens of each sequence."""
        self.lengths = np.maximum(self.lengths, ends)

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` slots, which are not fewer than there are."""
        self.cursor.capacity = capacity
        for layer in self.spec_layers:
            layer.grow(capacity)

    def compact(self, base: torch.Tensor, path: torch.Tensor) -> None:
        """Move the keys and values of an accepted path to the slots after the root, in all layers.

        Args:
            base: [B] int64, slot of node 0.
            path: [B, P], numbers of the nodes on the path from the root down, then -1.
        """
        if path.device.type == "cpu" and _is_in_place(path):
            return
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for layer in self.spec_layers:
            if not layer.is_initialized:
                continue  # without a cache of its own
            keys, values = layer.buffers
            by_device.setdefault(keys.device, []).extend((keys, values))
        for device, buffers in by_device.items():
            kv_compact_(buffers, base.to(device), path.to(device))

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of each sequence.

        Raises:
            ValueError: a sequence would grow.
        """
        if (lengths > self.lengths).any():
            raise ValueError(
                f"lengths must be at most the cache's {self.lengths.tolist()}, "
                f"got {lengths.tolist()}"
            )
        self.lengths = lengths.astype(np.int64, copy=True)
        self.cursor.past = int(lengths.max())

    def fill(
        self, entries: list[tuple[torch.Tensor, torch.Tensor] | None], lengths: Lengths
    ) -> None:
        """Start from keys and values [B, H, n, D] of each layer; ``lengths[b]`` of n are tokens.

        An entry is None for a layer without a cache of its own.
        """
        self.cursor.starts = torch.zeros(len(lengths), dtype=torch.int64, device=self.device)
        for layer, held in zip(self.spec_layers, entries, strict=True):
            if held is not None:
                layer.update(*held)
        self.lengths = lengths
        self.cursor.past = int(lengths.max())

    def take(self, b: int, other: SpecCache, index: int = 0, length: int | None = None) -> None:
        """Hold as sequence ``b`` the keys and values of sequence ``index`` of another cache.

        Of its tokens the first ``length`` are held, or all.
        """
        length = int(other.lengths[index]) if length is None else length
        if length >= self.cursor.capacity:
            self.grow(length + 1)
        for mine, its in zip(self.spec_layers, other.spec_layers, strict=True):
            if not its.is_initialized:
                continue  # without a cache of its own
            if not mine.is_initialized:
                like = (x[:1].expand(len(self.lengths), -1, -1, -1) for x in its.buffers)
                mine.lazy_initialization(*like)
            for into, taken in zip(mine.buffers, its.buffers, strict=True):
                into[b, :, :length] = taken[index, :, :length]
        self.lengths[b] = length
        self.cursor.past = int(self.lengths.max())


def _is_in_place(path: torch.Tensor) -> bool:
    """Whether no node of a path [B, P] on the host has to move."""
    return all(node in (n, -1) for nodes in path.tolist() for n, node in enumerate(nodes))
