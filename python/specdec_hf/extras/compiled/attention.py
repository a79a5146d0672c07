"""Attention of compiled layers, which reads keys and values where they lie in the cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec_hf.runner.packed.attention import follows_mask

NAME = "specdec_folded_attention"


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As Transformers' own attention of kind "sdpa", which repeats keys and values under a mask.

    The query heads that share keys become queries of one head.

    Args:
        module: of a compiled layer.
        query: [B, H, n, D].
        key, value: [B, H / groups, S, D].
        attention_mask: [B, 1, n, S] bool; others, and none, take Transformers' own attention, as do
            other arguments that change what is computed.
    """
    size, shared = query.shape[2], key.shape[1]
    groups = query.shape[1] // shared
    mask = attention_mask
    if groups == 1 or not follows_mask(mask, kwargs) or mask is None or mask.shape[1] != 1:
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, **kwargs
        )
        return out
    queries = query.unflatten(1, (shared, groups)).flatten(2, 3)  # [B, H / groups, groups n, D]
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries, key, value, mask.repeat(1, 1, groups, 1), dropout, scale=scaling
    )
    heads = attended.unflatten(2, (groups, size)).flatten(1, 2)  # [B, H, n, D]
    return heads.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
