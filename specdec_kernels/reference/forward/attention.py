"""Specification of `cached_attention`: the softmax of each query over the slots that it sees."""

from __future__ import annotations

import torch
from torch import Tensor


def cached_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    """One head of one query at a time; hidden slots are left out before anything is computed."""
    batch, heads, queries, size = query.shape
    group = heads // keys.shape[1]
    out = query.new_zeros((batch, queries, heads, values.shape[3]))
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(queries)):
        seen = slice(None) if mask is None else mask[b, 0, i]
        key, value = (x[b, h // group][seen].double() for x in (keys, values))
        if len(key) == 0:
            continue
        scores = key @ query[b, h, i].double() * (size**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out[b, i, h] = (scores.softmax(0) @ value).to(query.dtype)
    return out
