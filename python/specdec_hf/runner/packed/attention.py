"""Attention of a few tokens over the slots of a cache, in the forwards of a packed model."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec_kernels import cached_attention

NAME = "specdec_cached_attention"


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
    """As Transformers' own attention of kind "sdpa", but by `cached_attention`.

    Keys and values of a group of heads are read once where they lie, and the bits of a token follow
    from what it sees alone.

    Args:
        module: of a packed model.
        query: [B, H, n, D].
        key, value: [B, H / groups, S, D].
        attention_mask: [B, 1, n, S] bool; others, and none, take Transformers' own attention, as do
            other arguments that change what is computed.
    """
    # Under autocast rotary embeddings leave queries and keys, but not values, in float32.
    alike = query.dtype == key.dtype == value.dtype
    if not alike or not follows_mask(attention_mask, kwargs):
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return out
    return cached_attention(query, key, value, attention_mask, scale=scaling), None


def follows_mask(mask: torch.Tensor | None, kwargs: Mapping[str, Any]) -> bool:
    """Whether a boolean mask alone says what a forward's queries see, and how.

    Args:
        mask: of the forward.
        kwargs: what else its layers get.
    """
    if mask is None or mask.dtype != torch.bool:
        return False
    return all(kwargs.get(name) is None for name in ("softcap", "position_bias", "cache"))


AttentionInterface.register(NAME, attend)


def _only_looks_up(forward: Any) -> bool:
    """Whether a forward reads the name of its attention only once, to look it up."""
    try:
        return inspect.getsource(forward).count("_attn_implementation") == 1
    except OSError:  # made at run time
        return False


def attend_by(module: Any, name: str = NAME) -> bool:
    """Let a module of a copy attend by a registered function, and say whether it can.

    Args:
        module: changed in place: it gets a configuration of its own, with this name.
    """
    config = vars(module).get("config")
    functions = getattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS", {})
    if (
        config is None
        or "is_causal" not in vars(module)
        or getattr(config, "_attn_implementation", None) != "sdpa"
        or not _only_looks_up(type(module).forward)
        # A model may put a function of its own in the place of the common one.
        or functions.get("sdpa") is not sdpa_attention_forward
    ):
        return False
    module.config = copy.copy(config)
    module.config._attn_implementation_internal = name
    return True
