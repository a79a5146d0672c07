"""A cache for batches whose sequences have different lengths, under the unmodified forward.

The forward writes keys and values where the cache's cursor points, and a mask made from the lengths
hides the slots that hold padding or rejected drafts. Truncation therefore moves no data: it lowers
a length, and the next window overwrites the slots after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from specdec_hf.cache.hidden_states import HiddenStates
from specdec_hf.cache.model_call import run_model
from specdec_hf.cache.protocol import Lengths, context_length
from specdec_kernels import kv_append_, kv_compact_, tree_attention

# A "dummy" layer has no cache of its own: it reads that of an earlier layer, or attends to nothing.
MASKED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "dummy"})
# The forwards of a sequence alone that need no mask; see `SpecCache`.
FIRST, SINGLE = "first tokens", "single token"


class _Cursor:
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

    def __init__(self, cursor: _Cursor) -> None:
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
        return self.cursor.past

    def get_max_length(self) -> int:
        return -1


class SpecCache(Cache):
    """Key and value buffers for a whole batch, with one length per sequence.

    Token ``t`` of a sequence lies in slot ``t``; left padding is never stored. The forward gets
    explicit position ids and a 4-D mask made from the lengths: boolean for scaled-dot-product
    attention, additive for eager attention, and one per layer type where the model has several.

    A sequence alone needs no mask for its first tokens (`FIRST`), nor for a single one (`SINGLE`):
    the first are causal, and the single one sees every slot. There ``omits_mask`` leaves the mask
    out, as plain generation does, so that scaled-dot-product attention skips what a causal mask
    hides.

    Args:
        model: the causal language model whose forward will use this cache.
        batch_size: number of sequences B.
        capacity: slots S to allocate at first; the buffers grow when needed.

    Attributes:
        lengths: [B], tokens that each sequence has in the cache.
        omits_mask: the kinds of forwards without a mask, `FIRST` and `SINGLE`; none at first. Add
            only those that the self-check has seen of the model.
        omitted: the kinds of forwards that had no mask.

    Raises:
        ValueError: the model's attention or layer types cannot take such a mask.
    """

    kind = "spec"

    def __init__(self, model: Any, batch_size: int, capacity: int) -> None:
        config = model.config.get_text_config(decoder=True)
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"cache='spec' cannot serve {type(model).__name__}: {reason}")
        self._model = model
        self._cursor = _Cursor()
        self._cursor.capacity = capacity
        layer_types, _ = get_layer_types_and_kwargs(config)
        self.spec_layers = [SpecLayer(self._cursor) for _ in layer_types]
        super().__init__(layers=list(self.spec_layers))
        self.lengths: Lengths = np.zeros(batch_size, dtype=np.int64)
        self.device: torch.device = model.device
        self.omits_mask: frozenset[str] = frozenset()
        self.omitted: set[str] = set()
        self.later_inputs: Any = None
        self.hidden_states: list[HiddenStates] | None = None
        self.hidden_layers: frozenset[int] | None = None
        self._context = context_length(model)
        self._sliding_window: int | None = getattr(config, "sliding_window", None)
        self._mask_types: list[str] | None = (
            sorted(set(config.layer_types)) if getattr(config, "layer_types", None) else None
        )
        self._additive: torch.dtype | None = (
            model.dtype if config._attn_implementation == "eager" else None
        )
        # With a mask, a single token's heads that share keys read them once. Without, torch 2.13
        # reads them for each head, and converts them if they are 16-bit.
        self._masked_is_faster = self.device.type == "cpu" and model.dtype != torch.float32
        self._slots = torch.arange(capacity, device=self.device)

    def window(self, starts: Lengths, size: int) -> dict[str, Any]:
        """Model inputs for ``size`` tokens per sequence, the first at position ``starts[b]``.

        A negative position is left padding: its key and value are not stored, and its logits are
        not used.

        Args:
            starts: [B], position of each sequence's first token.
            size: tokens per sequence in this forward.

        Returns:
            ``past_key_values``, ``position_ids`` [B, size] and ``attention_mask``, which may be
            None.
        """
        visible = int(starts.max()) + size
        first_slots = torch.from_numpy(starts.copy()).to(self.device, non_blocking=True)
        self._move_cursor(first_slots, int(starts.max()), visible)
        positions = np.maximum(starts[:, None] + np.arange(size), 0)
        if self._context is not None:
            # Positions beyond the context belong to sequences that have ended or draft nothing:
            # their logits are not used, but the model's position table must not be overrun.
            np.minimum(positions, self._context - 1, out=positions)
        position_ids = torch.from_numpy(positions).to(self.device, non_blocking=True)
        self.lengths = np.maximum(self.lengths, starts + size)
        return {
            "past_key_values": self,
            "position_ids": position_ids,
            "attention_mask": self._mask(position_ids, starts, visible),
        }

    def tree_window(self, roots: Lengths, parents: torch.Tensor, skip: int = 0) -> dict[str, Any]:
        """Model inputs for a tree below each sequence's root, all at once or level by level.

        The root of sequence ``b`` goes to slot ``roots[b]`` and node ``n`` to slot
        ``roots[b] + 1 + n``. A node attends to the tokens before the root and to its own ancestors.

        Args:
            roots: [B], position of each sequence's root.
            parents: [B, N] int32 or int64, of the nodes; -1 is the root.
            skip: how many of [root, node 0, node 1, ...] are in the cache already.

        Returns:
            As `window`, for N + 1 - skip tokens per sequence.
        """
        visible = int(roots.max()) + parents.shape[1] + 1
        lengths = torch.from_numpy(roots.copy()).to(self.device, non_blocking=True)
        self._move_cursor(lengths + skip, int(roots.max()) + skip, visible)

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
        """Move the keys and values of an accepted path to the slots after the root, in all layers.

        Args:
            base: [B] int64, slot of node 0.
            path: [B, P], numbers of the nodes on the path from the root down, then -1.
        """
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
        self._cursor.past = int(lengths.max())

    def forward(self, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
        """Feed the next tokens of every sequence; arguments and result as in `forward_window`."""
        return run_model(self._model, self, tokens, self.window(starts, tokens.shape[1]), keep)

    def fill(
        self, entries: list[tuple[torch.Tensor, torch.Tensor] | None], lengths: Lengths
    ) -> None:
        """Start from keys and values [B, H, n, D] of each layer; ``lengths[b]`` of n are tokens.

        An entry is None for a layer without a cache of its own.
        """
        self._cursor.starts = torch.zeros(len(lengths), dtype=torch.int64, device=self.device)
        for layer, held in zip(self.spec_layers, entries, strict=True):
            if held is not None:
                layer.update(*held)
        self.lengths = lengths
        self._cursor.past = int(lengths.max())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._cursor.past

    def _grow(self, needed: int) -> None:
        capacity = max(needed, self._cursor.capacity + self._cursor.capacity // 2)
        self._cursor.capacity = capacity
        for layer in self.spec_layers:
            layer.grow(capacity)
        self._slots = torch.arange(capacity, device=self.device)

    def _move_cursor(self, starts: torch.Tensor, past: int, visible: int) -> None:
        """Tell all layers which slots the next forward writes and sees."""
        if visible > self._cursor.capacity:
            self._grow(visible)
        self._cursor.starts = starts
        self._cursor.past = max(past, 0)
        self._cursor.visible = visible

    def _mask(
        self, position_ids: torch.Tensor, starts: Lengths, visible: int
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        kind = self._causal_kind(starts, position_ids.shape[1], visible)
        if kind in self.omits_mask:
            self.omitted.add(kind)
            return None
        queries = position_ids[:, None, :, None]  # [B, 1, n, 1]
        slots = self._slots[:visible]  # [S]

        def mask_of(sliding: int) -> torch.Tensor:
            full = slots <= queries
            return full & (slots > queries - sliding) if sliding else full

        return self._by_layer_type(mask_of)

    def _causal_kind(self, starts: Lengths, size: int, visible: int) -> str:
        """The kind of a forward that needs no mask, or "" where it needs one or is faster with."""
        if len(starts) != 1 or self._additive is not None:
            return ""
        if self._sliding_window and visible >= self._sliding_window:
            return ""
        if starts[0] == 0:
            return FIRST
        return SINGLE if size == 1 and not self._masked_is_faster else ""

    def _by_layer_type(
        self, mask_of: Callable[[int], torch.Tensor]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask in the form that the model takes.

        Args:
            mask_of: boolean mask [B, 1, n, S] for the size of a sliding window, 0 for none.
        """
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


def unsupported_reason(model: Any) -> str | None:
    """Why `SpecCache` cannot serve this model, or None if it can."""
    config = model.config.get_text_config(decoder=True)
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"attn_implementation must be 'sdpa' or 'eager', got {attention!r}"
    layer_types = set(get_layer_types_and_kwargs(config)[0])
    if not layer_types <= MASKED_LAYER_TYPES:
        others = sorted(layer_types - MASKED_LAYER_TYPES)
        return f"layer types {others} have no rollback per sequence"
    return None
