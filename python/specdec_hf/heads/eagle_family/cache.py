"""Keys and values of the pairs that a head has drafted from."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from specdec_hf.heads.eagle_family.config import PairConfig


class HeadCache:
    """Buffers [B, K, S, D] of keys and values; the pair at place p of a sequence lies in slot p.

    Args:
        config: of the head.
        batch_size: number of sequences B.
        like: a tensor of the head's dtype and device.
        capacity: slots S to allocate at first; the buffers grow when needed.
    """

    def __init__(
        self, config: PairConfig, batch_size: int, like: torch.Tensor, capacity: int = 256
    ) -> None:
        shape = (batch_size, config.kv_heads, capacity, config.head_dim)
        # Zeros, because attention multiplies hidden slots by a weight of 0, and 0 * NaN is NaN. A
        # graph is made for tensors of inference mode or for others, so they are always others.
        with torch.inference_mode(False):
            self._keys, self._values = like.new_zeros(shape), like.new_zeros(shape)

    @property
    def batch_size(self) -> int:
        """The number of sequences."""
        return self._keys.shape[0]

    def suffices(self, other: HeadCache) -> bool:
        """Whether it holds as many sequences as another one, and as many slots."""
        mine, theirs = self._keys.shape, other._keys.shape
        return mine[0] == theirs[0] and mine[2] >= theirs[2]

    def take(self, b: int, other: HeadCache, index: int, pairs: int) -> None:
        """Hold as sequence ``b`` the first pairs of sequence ``index`` of another cache."""
        theirs = other._keys, other._values
        for into, taken in zip(self.buffers(pairs), theirs, strict=True):
            into[b, :, :pairs] = taken[index, :, :pairs]

    def clear(self) -> None:
        """Set all slots to zero."""
        self._keys.zero_()
        self._values.zero_()

    def buffers(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with room for more than this many slots, as in `SpecCache`."""
        capacity = self._keys.shape[2]
        if slots >= capacity:
            more = max(slots + 1, capacity + capacity // 2) - capacity
            with torch.inference_mode(False):
                self._keys, self._values = (
                    pad(x, (0, 0, 0, more)) for x in (self._keys, self._values)
                )
        return self._keys, self._values
