"""The buffers of one layer of a `SpecCache`, and the cursor that all its layers share."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from specdec_kernels import kv_append_


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
