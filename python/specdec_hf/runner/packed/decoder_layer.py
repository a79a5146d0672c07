"""Decoder layers of a packed model: all in one op, or each in two around its attention.

For a few tokens the dozens of small calls of a layer's own forward take as long as its products.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from specdec_hf.runner.packed.attention import attend, follows_mask
from specdec_hf.runner.protocol import CACHE_NAME
from specdec_hf.runner.spec_cache import SpecCache
from specdec_kernels import (
    PackedDecoderLayer,
    PackedDecoderLayers,
    decoder_layers_,
    norm_qkv_rope,
    output_norm_mlp,
)

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

    def takes(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether the ops take such hidden states and angles."""
        return (
            cos.dtype == sin.dtype == x.dtype == self.packed.norms[0].dtype
            and cos.ndim == 3
            and cos.shape[-1] == self.head_dim
            and not torch.is_autocast_enabled("cpu")
        )


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
            if parts.takes(hidden_states, cos, sin):
                cache = kwargs.pop(CACHE_NAME, None)
                return parts.forward(hidden_states, attention_mask, cache, cos, sin, kwargs)
        return kind.forward(
            self, hidden_states, attention_mask=attention_mask, position_ids=position_ids,
            use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
        )  # fmt: skip

    return type(f"Packed{kind.__name__}", (kind,), {"forward": forward})


class LayerStack:
    """The layers of a decoder, which `decoder_layers_` runs over a `SpecCache`.

    Args:
        parts: of its layers.

    Attributes:
        layers: their weights; None where the layers are of several kinds.
    """

    def __init__(self, parts: list[LayerParts]) -> None:
        self.parts, self.packed = parts, [one.packed for one in parts]
        kinds = {
            (one.epsilon, one.scale, len(one.qkv_biases), one.output_bias is None,
             len(one.mlp_biases), len(one.head_norms))
            for one in self.packed
        }  # fmt: skip
        self.layers = PackedDecoderLayers(self.packed) if len(kinds) == 1 else None

    def run(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Any, cache: SpecCache,
        *, every_layer: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Hidden states [B, n, H] after the last layer, or [L, B, n, H] after each."""
        assert self.layers is not None
        caches: list[torch.Tensor] = []
        for one, packed in zip(self.parts, self.packed, strict=True):
            own = cache.spec_layers[one.layer_idx]
            if not own.is_initialized:
                heads = packed.qkv[1].out_features // one.head_dim
                none = x.new_empty((len(x), heads, 0, one.head_dim))
                own.lazy_initialization(none, none)
            caches += own.buffers
        return decoder_layers_(
            x, self.layers, cos, sin, caches, cache.cursor.starts, mask, every_layer=every_layer
        )


# A forward of the loop passes no other arguments beside ids, positions and mask.
_ARGUMENTS = frozenset({CACHE_NAME, "output_hidden_states", "return_dict"})


def _stack_of(decoder: Any, kwargs: Any) -> LayerStack | None:
    """The layers of a decoder where a forward of the loop runs them in one op, else None."""
    if not isinstance(kwargs.get(CACHE_NAME), SpecCache) or not kwargs.keys() <= _ARGUMENTS:
        return None
    layers = list(decoder._modules["layers"]._modules.values())
    parts = [vars(one).get("parts") for one in layers[: decoder.config.num_hidden_layers]]
    if not parts or not all(isinstance(one, LayerParts) for one in parts):
        return None
    stack: LayerStack | None = vars(decoder).get("stack")
    if stack is None or stack.packed != [one.packed for one in parts]:
        stack = decoder.stack = LayerStack(parts)
    return None if stack.layers is None else stack


@functools.cache
def _fused_decoder_class(kind: Any) -> type:
    """A subclass, whose forwards of the loop run all layers in one op.

    They compute what the forwards of the four families do: embeddings, angles, layers, norm.
    """

    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        mask = attention_mask
        if isinstance(mask, dict) and len(mask) == 1:  # by type of layer
            (mask,) = mask.values()
        follows = isinstance(mask, torch.Tensor) and follows_mask(mask, {})
        stack = _stack_of(self, kwargs) if follows and position_ids is not None else None
        if stack is not None:
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            cos, sin = self.rotary_emb(x, position_ids)
            if stack.parts[0].takes(x, cos, sin):
                every, cache = bool(kwargs.get("output_hidden_states")), kwargs[CACHE_NAME]
                y = stack.run(x, cos, sin, mask, cache, every_layer=every)
                last = self.norm(y[-1] if every else y)
                hidden = (x, *y[:-1], last) if every else None
                output = {"last_hidden_state": last, CACHE_NAME: cache, "hidden_states": hidden}
                return BaseModelOutputWithPast(**output)
        return kind.forward(
            self, input_ids, attention_mask=attention_mask, position_ids=position_ids,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip

    # Transformers knows by the full name of a class which states it collects.
    name = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"forward": forward, **name})


def fuse(module: nn.Module) -> bool:
    """Let a decoder layer of a packed model run by the ops, and say whether it can.

    A decoder of such layers is told to run them in one op where it can.

    Args:
        module: changed in place.
    """
    kind: Any = type(module)
    family = FAMILIES.get(kind.__module__)
    if family is not None and kind.__name__ == f"{family}Model":
        if kind.forward.__module__ == kind.__module__:
            module.__class__ = _fused_decoder_class(kind)
        return False
    if unfused_reason(module) is not None:
        return False
    module.parts = LayerParts(module)  # type: ignore[assignment]
    module.__class__ = _fused_class(kind)
    return True


def refresh_fused(module: nn.Module) -> None:
    """Let a decoder layer that runs by the ops take its weights as they are packed now."""
    parts = vars(module).get("parts")
    if isinstance(parts, LayerParts):
        parts.refresh()
