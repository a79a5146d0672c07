"""Specification of a decoder layer and of its halves, as Transformers computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..kv.append import kv_append_
from .attention import cached_attention
from .linear import packed_linear


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.double()
    mean = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean + epsilon)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x is [B, n, H, D]; cos and sin are [B, n, D]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(2) + torch.cat([-b, a], dim=-1) * sin.unsqueeze(2)


def norm_qkv_rope(
    x: Tensor,
    norm: Tensor,
    qkv: Sequence[Tensor],
    in_features: Sequence[int],
    out_features: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    biases: Sequence[Tensor],
    head_norms: Sequence[Tensor],
    epsilon: float,
) -> tuple[Tensor, ...]:
    """RMSNorm, three projections, the norms of heads, and the rotation of queries and keys."""
    parts = x.unflatten(-1, norm.shape) if norm.dim() == 2 else x
    normed = rms_norm(parts, norm, epsilon).reshape(x.shape)
    outputs = []
    for i in range(3):
        bias = biases[i] if biases else None
        y = packed_linear(normed, qkv[i], in_features[i], out_features[i], bias)
        y = y.unflatten(-1, (-1, cos.shape[-1]))
        if head_norms and i < 2:
            y = rms_norm(y, head_norms[i], epsilon)
        outputs.append(_rotated(y, cos, sin) if i < 2 else y)
    return tuple(outputs)


def output_norm_mlp(
    attended: Tensor,
    residual: Tensor,
    norm: Tensor,
    output: Tensor,
    mlp: Sequence[Tensor],
    in_features: Sequence[int],
    out_features: Sequence[int],
    output_bias: Tensor | None,
    biases: Sequence[Tensor],
    epsilon: float,
) -> Tensor:
    """The output projection and the gated network, each with its residual."""
    sizes = list(zip(in_features, out_features, strict=True))
    bias = biases or (None,) * 3
    h = residual + packed_linear(attended, output, *sizes[0], output_bias)
    normed = rms_norm(h, norm, epsilon)
    gate, up = (packed_linear(normed, mlp[i], *sizes[1 + i], bias[i]) for i in range(2))
    return h + packed_linear(silu(gate) * up, mlp[2], *sizes[3], bias[2])


def decoder_layers_(
    x: Tensor,
    norms: Sequence[Tensor],
    weights: Sequence[Tensor],
    in_features: Sequence[int],
    out_features: Sequence[int],
    qkv_biases: Sequence[Tensor],
    output_biases: Sequence[Tensor],
    mlp_biases: Sequence[Tensor],
    head_norms: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    caches: Sequence[Tensor],
    positions: Tensor,
    mask: Tensor,
    scale: float,
    epsilon: float,
    every_layer: bool,
) -> Tensor:
    """For each layer the first half, the cache, attention and the second half."""
    results = []
    for i in range(len(norms) // 2):
        norm, other = norms[2 * i : 2 * i + 2]
        own = slice(7 * i, 7 * i + 7)
        panels, ins, outs = weights[own], in_features[own], out_features[own]
        query, key, value = (
            y.transpose(1, 2)
            for y in norm_qkv_rope(
                x, norm, panels[:3], ins[:3], outs[:3], cos, sin, qkv_biases[3 * i : 3 * i + 3],
                head_norms[2 * i : 2 * i + 2], epsilon,
            )
        )  # fmt: skip
        both = caches[2 * i : 2 * i + 2]
        kv_append_(both, [key, value], positions)
        keys, values = (cache[:, :, : mask.shape[3]] for cache in both)
        attended = cached_attention(query, keys, values, mask, scale, None)
        x = output_norm_mlp(
            attended.flatten(2), x[..., x.shape[2] - len(other) :], other, panels[3], panels[4:],
            ins[3:], outs[3:], output_biases[i] if output_biases else None,
            mlp_biases[3 * i : 3 * i + 3], epsilon,
        )  # fmt: skip
        results.append(x)
    return torch.stack(results) if every_layer else x
