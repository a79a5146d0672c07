"""Caches that can be rolled back row by row, for the unmodified ``model.forward``.

The loop asks for two things only: ``window(starts, size)`` gives the model inputs (cache, position
ids, mask) for the next ``size`` tokens of every row, and ``truncate(lengths)`` drops what was
rejected. `SpecCache` does both for a whole ragged batch in static buffers; `DynamicRow` wraps
transformers' own ``DynamicCache`` for a single row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    get_layer_types_and_kwargs,
)

from specdec_kernels import kv_append_, kv_compact_, tree_attention

Lengths = NDArray[np.int64]

MASKED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class RowCache(Protocol):
    """What the loop needs of a cache. ``lengths`` [B] counts the committed tokens of each row."""

    lengths: Lengths

    def window(self, starts: Lengths, size: int) -> dict[str, Any]: ...

    def truncate(self, lengths: Lengths) -> None: ...


class _Cursor:
    """Where the next entries go; one object shared by all layers of a cache."""

    def __init__(self) -> None:
        self.starts: torch.Tensor = torch.zeros(0, dtype=torch.int64)  # [B]
        self.visible = 0
        self.capacity = 0


class SpecLayer(CacheLayerMixin):
    """One layer's static buffers [B, H, S, D]; entry ``j`` of row ``b`` goes to ``starts[b]+j``."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cursor: _Cursor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cursor = cursor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Zeros, not empty: a masked slot still meets its weight of 0, and 0 * NaN is NaN. Normal
        # tensors, not inference tensors: the returned cache is the user's to write into.
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
        # Layers may live on several devices; to() is free where the positions already are.
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
        """Move the buffers into larger ones of ``capacity`` slots."""
        if self.is_initialized:
            with torch.inference_mode(False):
                self.keys, self.values = (
                    torch.nn.functional.pad(x, (0, 0, 0, capacity - x.shape[2]))
                    for x in self.buffers
                )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.visible, 0

    def get_seq_length(self) -> int:
        return self.cursor.visible

    def get_max_length(self) -> int:
        return -1


class SpecCache(Cache):
    """Static, growing key and value buffers with one length per row.

    Token ``t`` of a row lives in slot ``t``: left padding is never stored. The forward gets
    explicit position ids and a 4-D mask made from the lengths, boolean for scaled-dot-product
    attention, additive for eager attention, one per layer type where the model has several.

    Args:
        model: the causal language model whose forward will use this cache.
        batch_size: number of rows B.
        capacity: slots S to allocate; grows when needed.

    Raises:
        ValueError: the model's attention or layer types cannot take such a mask.
    """

    def __init__(self, model: Any, batch_size: int, capacity: int) -> None:
        config = model.config.get_text_config(decoder=True)
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"cache='spec' cannot serve {type(model).__name__}: {reason}")
        self._cursor = _Cursor()
        self._cursor.capacity = capacity
        layer_types, _ = get_layer_types_and_kwargs(config)
        self.rows = [SpecLayer(self._cursor) for _ in layer_types]
        super().__init__(layers=list(self.rows))
        self.lengths: Lengths = np.zeros(batch_size, dtype=np.int64)
        self.device: torch.device = model.device
        self._context = context_of(model)
        self._sliding_window: int | None = getattr(config, "sliding_window", None)
        self._mask_types: list[str] | None = (
            sorted(set(config.layer_types)) if getattr(config, "layer_types", None) else None
        )
        self._additive: torch.dtype | None = (
            model.dtype if config._attn_implementation == "eager" else None
        )
        self._slots = torch.arange(capacity, device=self.device)

    def window(self, starts: Lengths, size: int) -> dict[str, Any]:
        """Model inputs for ``size`` tokens per row, the first at position ``starts[b]``.

        A negative position is left padding: it is not stored, and nobody reads its output.

        Args:
            starts: [B], position of each row's first token.
            size: tokens per row in this forward.

        Returns:
            ``past_key_values``, ``position_ids`` [B, size] and ``attention_mask``.
        """
        visible = int(starts.max()) + size
        self._aim(torch.from_numpy(starts.copy()).to(self.device, non_blocking=True), visible)
        positions = np.maximum(starts[:, None] + np.arange(size), 0)
        if self._context is not None:
            # Only rows that are finished or out of drafts run past the context; see rounds.py.
            np.minimum(positions, self._context - 1, out=positions)
        position_ids = torch.from_numpy(positions).to(self.device, non_blocking=True)
        self.lengths = np.maximum(self.lengths, starts + size)
        return {
            "past_key_values": self,
            "position_ids": position_ids,
            "attention_mask": self._mask(position_ids, visible),
        }

    def tree_window(self, roots: Lengths, parents: torch.Tensor, skip: int = 0) -> dict[str, Any]:
        """Model inputs for a tree of tokens below each row's root, all at once or level by level.

        The root of row b goes to slot ``roots[b]``, node n to ``roots[b] + 1 + n``; each sees the
        tokens before the root and what is above it.

        Args:
            roots: [B], position of each row's root.
            parents: [B, N] int32 or int64, of the nodes; -1 is the root.
            skip: how many of root and nodes are in the cache already.

        Returns:
            As `window`, for N + 1 - skip tokens per row.
        """
        visible = int(roots.max()) + parents.shape[1] + 1
        lengths = torch.from_numpy(roots.copy()).to(self.device, non_blocking=True)
        self._aim(lengths + skip, visible)

        def mask_of(sliding: int) -> torch.Tensor:
            tree = tree_attention(parents, lengths, slots=visible, window=sliding)
            return tree.mask[:, None, skip:]

        positions = tree_attention(parents, lengths, slots=0).positions[:, skip:]
        if self._context is not None:
            positions = positions.clamp(max=self._context - 1)
        self.lengths = np.maximum(self.lengths, roots + parents.shape[1] + 1)
        return {
            "past_key_values": self,
            "position_ids": positions,
            "attention_mask": self._by_layer_type(mask_of),
        }

    def compact(self, base: torch.Tensor, path: torch.Tensor) -> None:
        """Move the tokens of a path through a tree to the front of it, in all layers.

        Args:
            base: [B] int64, slot of node 0.
            path: [B, P], node numbers from the root on, then -1.
        """
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for layer in self.rows:
            keys, values = layer.buffers
            by_device.setdefault(keys.device, []).extend((keys, values))
        for device, buffers in by_device.items():
            kv_compact_(buffers, base.to(device), path.to(device))

    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of each row. Raises when a row would grow."""
        if (lengths > self.lengths).any():
            raise ValueError(f"truncate cannot grow a row: have {self.lengths}, asked {lengths}")
        # The mask hides the slots beyond a row's length, and the next window overwrites them.
        self.lengths = lengths.astype(np.int64, copy=True)

    def fill(self, entries: list[tuple[torch.Tensor, torch.Tensor]], lengths: Lengths) -> None:
        """Start from given keys and values [B, H, n, D] per layer, ``lengths[b]`` of them real."""
        self._cursor.starts = torch.zeros(len(lengths), dtype=torch.int64, device=self.device)
        for layer, (keys, values) in zip(self.rows, entries, strict=True):
            layer.update(keys, values)
        self.lengths = lengths

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.lengths.max()) if self.lengths.size else 0

    def _grow(self, needed: int) -> None:
        capacity = max(needed, self._cursor.capacity + self._cursor.capacity // 2)
        self._cursor.capacity = capacity
        for layer in self.rows:
            layer.grow(capacity)
        self._slots = torch.arange(capacity, device=self.device)

    def _aim(self, starts: torch.Tensor, visible: int) -> None:
        """Point all layers at the slots that the next forward writes and sees."""
        if visible > self._cursor.capacity:
            self._grow(visible)
        self._cursor.starts = starts
        self._cursor.visible = visible

    def _mask(
        self, position_ids: torch.Tensor, visible: int
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        queries = position_ids[:, None, :, None]  # [B, 1, n, 1]
        slots = self._slots[:visible]  # [S]

        def mask_of(sliding: int) -> torch.Tensor:
            full = slots <= queries
            return full & (slots > queries - sliding) if sliding else full

        return self._by_layer_type(mask_of)

    def _by_layer_type(
        self, mask_of: Callable[[int], torch.Tensor]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """What the model takes, from boolean masks [B, 1, n, S] by sliding window, 0 for none."""
        window = self._sliding_window or 0
        if self._mask_types is None:
            return self._encode(mask_of(window))
        return {
            layer_type: self._encode(mask_of(window if layer_type == "sliding_attention" else 0))
            for layer_type in self._mask_types
        }

    def _encode(self, mask: torch.Tensor) -> torch.Tensor:
        if self._additive is None:
            return mask
        zero = torch.zeros((), dtype=self._additive, device=mask.device)
        return torch.where(mask, zero, torch.finfo(self._additive).min)


class DynamicRow:
    """One row over transformers' own ``DynamicCache``, rolled back with ``crop``."""

    def __init__(self, model: Any, cache: DynamicCache | None = None) -> None:
        self.cache = DynamicCache(config=model.config) if cache is None else cache
        self.cache.activate_past_recording()
        self.device: torch.device = model.device
        self.lengths: Lengths = np.array([self.cache.get_seq_length()], dtype=np.int64)

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
        # crop(0) matters: a sliding layer sheds what its window no longer needs only in crop.
        self.cache.crop(-int(self.lengths[0] - lengths[0]))
        self.lengths = lengths.astype(np.int64, copy=True)

    def release(self) -> DynamicCache:
        """The cache as plain ``generate`` would leave it."""
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False
            # Outside inference mode a clone is a normal tensor again, the user's to write into.
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return self.cache


def context_of(model: Any) -> int | None:
    """Most tokens the model has positions for, None when its config does not say."""
    config = model.config.get_text_config(decoder=True)
    context: int | None = getattr(config, "max_position_embeddings", None)
    return context


def unsupported_reason(model: Any) -> str | None:
    """Why `SpecCache` cannot serve this model, or None if it can."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        return "encoder-decoder models are not supported"
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"attn_implementation must be 'sdpa' or 'eager', got {attention!r}"
    layer_types = set(get_layer_types_and_kwargs(config)[0])
    if not layer_types <= MASKED_LAYER_TYPES:
        return f"layer types {sorted(layer_types - MASKED_LAYER_TYPES)} have no per-row rollback"
    return None


def make_cache(model: Any, batch_size: int, capacity: int, kind: str = "auto") -> RowCache:
    """The cache named by ``kind``: "spec", "dynamic" (one row only), or "auto" (spec if it can).

    Raises:
        ValueError: unknown kind, or a kind that this model or batch size cannot use.
    """
    if kind not in ("auto", "spec", "dynamic"):
        raise ValueError(f"cache must be 'auto', 'spec' or 'dynamic', got {kind!r}")
    reason = unsupported_reason(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__}: {reason}")
    if kind == "spec" or (kind == "auto" and reason is None):
        return SpecCache(model, batch_size, capacity)
    if batch_size != 1:
        raise ValueError(
            f"cache='dynamic' needs batch size 1, got {batch_size}"
            + (f" (cache='spec' cannot be used: {reason})" if reason else "")
        )
    row = DynamicRow(model)
    if not row.cache.is_croppable:
        raise ValueError(f"{type(model).__name__} keeps a state that cannot be rolled back")
    return row
