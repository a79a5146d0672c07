"""Decoder layers of a packed model that run in one op each, or in two around their attention.

For a few tokens the dozens of small calls of a layer's own forward take as long as its products.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from specdec_hf.runner.packed.attention import attend, follows_mask
from specdec_hf.runner.protocol import CACHE_NAME
from specdec_hf.runner.spec_cache import SpecCache
from specdec_kernels import PackedDecoderLayer, decoder_layer_, norm_qkv_rope, output_norm_mlp

# Modules of Transformers whose decoder layers compute what the ops do: with the names of their
# classes, and of the norms of heads that some have.
FAMILIES = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}": name
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
_HEAD_NORMS = ("q_norm", "k_norm")


def unfused_reason(layer: Any) -> str | None:
    """Why a module of a packed model does not run by the ops, or None.

    The classes and functions of a family are Transformers' own: a library that replaces one
    changes what a layer computes.
    """
    kind = type(layer)
    family = FAMILIES.get(kind.__module__)
    if family is None or kind.__name__ != f"{family}DecoderLayer":
        return "its class is none of those that the ops compute"
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for name in _HEAD_NORMS if (norm := getattr(attention, name, None)) is not None]
    parts = [(layer, "DecoderLayer"), (attention, "Attention"), (mlp, "MLP")]
    parts += [(norm, "RMSNorm") for norm in norms]
    for module, name in parts:
        own = type(module)
        if (own.__module__, own.__name__) != (kind.__module__, family + name):
            return f"it has a {own.__name__}"
        if own.forward.__module__ not in (kind.__module__, "torch.nn.modules.module"):
            return f"the forward of {own.__name__} was replaced"
    functions = vars(sys.modules[kind.__module__])
    if functions["apply_rotary_pos_emb"].__module__ != kind.__module__:
        return "the rotation of its heads was replaced"
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return f"its activation is {type(mlp.act_fn).__name__}"
    if len({norm.variance_epsilon for norm in norms}) != 1:
        return "its norms differ"
    if not all(hasattr(linear, "packed_weight") for linear in _linear_layers(layer)):
        return "not all of its linear layers are packed"
    dtypes = {linear.dtype for linear in _linear_layers(layer)}
    if len(dtypes | {parameter.dtype for parameter in layer.parameters()}) > 1:
        return "its parameters have several dtypes"
    mlp_biases = [linear.bias is None for linear in _linear_layers(layer)[4:]]
    qkv_biases = [linear.bias is None for linear in _linear_layers(layer)[:3]]
    if len(set(mlp_biases)) > 1 or len(set(qkv_biases)) > 1:
        return "only some of its linear layers have a bias"
    return None


def _linear_layers(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    ]  # fmt: skip


class LayerParts:
    """The modules of a layer, held here because a module looks its own up slowly."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self.linear = _linear_layers(layer)
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.head_norms = [getattr(attention, name, None) for name in _HEAD_NORMS]
        self.attention, self.scaling = attention, attention.scaling
        self.layer_idx, self.head_dim = attention.layer_idx, attention.head_dim
        self.refresh()

    def refresh(self) -> None:
        """Take the weights as they are packed now."""
        weights = [linear.packed_weight for linear in self.linear]
        bias = [linear.bias for linear in self.linear]
        self.packed = PackedDecoderLayer(
            norms=[norm.weight for norm in self.norms],
            qkv=weights[:3], output=weights[3], mlp=weights[4:],
            epsilon=self.norms[0].variance_epsilon, scale=self.scaling,
            qkv_biases=[] if bias[0] is None else bias[:3], output_bias=bias[3],
            mlp_biases=[] if bias[4] is None else bias[4:],
            head_norms=[norm.weight for norm in self.head_norms if norm is not None],
        )  # fmt: skip

    def forward(
        self, x: torch.Tensor, mask: Any, cache: Any, cos: Any, sin: Any, kwargs: Any
    ) -> torch.Tensor:
        if isinstance(cache, SpecCache) and follows_mask(mask, kwargs):
            own = cache.spec_layers[self.layer_idx]
            if own.is_initialized:
                starts = cache.cursor.starts
                return decoder_layer_(x, self.packed, cos, sin, own.buffers, starts, mask)
        packed = self.packed
        query, key, value = (
            states.transpose(1, 2)
            for states in norm_qkv_rope(
                x, packed.norms[0], packed.qkv, cos, sin, epsilon=packed.epsilon,
                biases=packed.qkv_biases, head_norms=packed.head_norms,
            )
        )  # fmt: skip
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attended, _ = attend(
            self.attention, query, key, value, mask, scaling=self.scaling, **kwargs
        )
        return output_norm_mlp(
            attended.flatten(2), x, packed.norms[1], packed.output, packed.mlp,
            epsilon=packed.epsilon, output_bias=packed.output_bias, biases=packed.mlp_biases,
        )  # fmt: skip


@functools.cache
def _fused_class(kind: Any) -> type:
    """A subclass, so that Transformers finds the layers whose outputs it collects."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Any:
        parts: LayerParts = self.parts
        if position_embeddings is not None and not kwargs.get("output_attentions"):
            cos, sin = position_embeddings
            like = cos.dtype == sin.dtype == hidden_states.dtype
            if (
                like
                and hidden_states.dtype == parts.norms[0]._parameters["weight"].dtype
                and cos.ndim == 3
                and cos.shape[-1] == parts.head_dim
                and not torch.is_autocast_enabled("cpu")
            ):
                cache = kwargs.pop(CACHE_NAME, None)
                return parts.forward(hidden_states, attention_mask, cache, cos, sin, kwargs)
        return kind.forward(
            self, hidden_states, attention_mask=attention_mask, position_ids=position_ids,
            use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
        )  # fmt: skip

    return type(f"Packed{kind.__name__}", (kind,), {"forward": forward})


def fuse(layer: nn.Module) -> bool:
    """Let a decoder layer of a packed model run by the ops, and say whether it can.

    Args:
        layer: changed in place.
    """
    if unfused_reason(layer) is not None:
        return False
    kind: Any = type(layer)
    layer.parts = LayerParts(layer)  # type: ignore[assignment]
    layer.__class__ = _fused_class(kind)
    return True


def refresh_fused(module: nn.Module) -> None:
    """Let a decoder layer that runs by the ops take its weights as they are packed now."""
    parts = vars(module).get("parts")
    if isinstance(parts, LayerParts):
        parts.refresh()
