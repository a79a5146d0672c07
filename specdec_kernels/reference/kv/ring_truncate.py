"""Specification of `ring_truncate_`, for caches of sliding-window layers; docs/rules.md#cache.

Token t lies in slot t % slots, where it took the place of token t - slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...arguments.in_place import read_first


def ring_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, window: int, zero_fill: bool
) -> Tensor:
    """Returns [B] int32 status: 1 where a token inside the window of the new length is gone."""
    (new_lengths,) = read_first([new_lengths], [lengths])
    status = torch.zeros(lengths.shape, dtype=torch.int32)
    for b in range(lengths.shape[0]):
        old = max(int(lengths[b]), 0)
        new = max(0, min(old, int(new_lengths[b])))
        lengths[b] = new
        for cache in caches:
            slots = cache.shape[2]
            token_in = {t % slots: t for t in range(max(old - slots, 0), old)}
            if any(token_in[t % slots] != t for t in range(max(new - window, 0), new)):
                status[b] = 1
            for slot in (s for s, t in token_in.items() if zero_fill and t >= new):
                cache[b, :, slot] = 0
    return status
