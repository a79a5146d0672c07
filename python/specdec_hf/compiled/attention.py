"""Attention of compiled layers on a CPU, in which heads that share keys and values read them once.

Transformers repeats keys and values for every query head of grouped-query attention wherever a
forward has more than one token, and where it is compiled also with one. On a CPU the copies and the
attention over them take up to six times as long as a single read. Here the tokens of all heads of a
group become the rows of one head, so that scaled-dot-product attention sees as many heads of
queries as of keys.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "specdec_grouped_sdpa"


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
    """As Transformers' own attention of kind "sdpa".

    Args:
        module: with ``num_key_value_groups`` heads of queries to one of keys.
        query: [B, H, n, D].
        key, value: [B, H / groups, S, D].
        attention_mask: [B, 1, n, S]; others, and none, take Transformers' own attention, as do
            other arguments that change what is computed.
    """
    own = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if own or attention_mask is None or attention_mask.shape[1] != 1:
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return out
    groups, (batch_size, _, size, _) = module.num_key_value_groups, query.shape
    rows = attention_mask.expand(batch_size, 1, size, -1)
    attended = scaled_dot_product_attention(
        query.reshape(batch_size, key.shape[1], groups * size, -1),
        key,
        value,
        attn_mask=rows[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3),
        dropout_p=dropout,
        scale=scaling,
    )
    return attended.reshape(batch_size, -1, size, value.shape[-1]).transpose(
        1, 2
    ).contiguous(), None


AttentionInterface.register(NAME, attend)


def _only_looks_up(forward: Any) -> bool:
    """Whether a forward reads the name of its attention only once, to look it up."""
    try:
        return inspect.getsource(forward).count("_attn_implementation") == 1
    except OSError:  # made at run time
        return False


def share_reads(module: Any) -> None:
    """Let a module of a twin attend as `attend` does, if it is one that gains by it.

    Args:
        module: changed in place: it gets a configuration of its own.
    """
    config = vars(module).get("config")
    if getattr(module, "num_key_value_groups", 1) == 1 or config is None:
        return
    weights = next(module.parameters(), None)
    functions = getattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS", {})
    if (
        weights is not None
        and weights.device.type == "cpu"
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and _only_looks_up(type(module).forward)
        # A model may put a function of its own in the place of the common one.
        and functions.get("sdpa") is sdpa_attention_forward
    ):
        module.config = copy.copy(config)
        module.config._attn_implementation_internal = NAME
