"""Keys and values of a head's decoder layer while it drafts."""

from __future__ import annotations

import torch

from specdec_hf.heads.config import HeadConfig
from specdec_kernels import kv_append_


class HeadCache:
    """Buffers [B, K, S, D] of keys and values; the pair at place p of a sequence lies in slot p.

    Args:
        config: of the head.
        batch_size: number of sequences B.
        like: a tensor of the head's dtype and device.
        capacity: slots S to allocate at first; the buffers grow when needed.
    """

    def __init__(
        self, config: HeadConfig, batch_size: int, like: torch.Tensor, capacity: int = 256
    ) -> None:
        shape = (2, batch_size, config.kv_heads, capacity, config.head_dim)
        # Zeros, because attention multiplies hidden slots by a weight of 0, and 0 * NaN is NaN.
        self._buffers = like.new_zeros(shape)

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, visible: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write pairs [B, K, n, D] from slots ``starts`` [B] on; the first ``visible`` slots."""
        capacity = self._buffers.shape[3]
        if visible > capacity:
            more = max(visible, capacity + capacity // 2) - capacity
            self._buffers = torch.nn.functional.pad(self._buffers, (0, 0, 0, more))
        held = self._buffers
        kv_append_([held[0], held[1]], [keys, values], starts)
        return held[0, :, :, :visible], held[1, :, :, :visible]
