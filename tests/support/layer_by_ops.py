"""A decoder layer by the four ops that `decoder_layer_` consists of."""

from __future__ import annotations

import torch

ops = torch.ops.specdec_kernels


def layer_by_ops(
    x, norms, weights, in_features, out_features, qkv_biases, output_bias, mlp_biases, head_norms,
    cos, sin, caches, positions, mask, scale, epsilon,
):  # fmt: skip
    """The arguments are those of the op's schema; the caches are written."""
    query, *entries = (
        y.transpose(1, 2)
        for y in ops.norm_qkv_rope(
            x, norms[0], weights[:3], in_features[:3], out_features[:3], cos, sin, qkv_biases,
            head_norms, epsilon,
        )
    )  # fmt: skip
    ops.kv_append_(caches, entries, positions)
    visible = [cache[:, :, : mask.shape[3]] for cache in caches]
    attended = ops.cached_attention(query, *visible, mask, scale, None)
    return ops.output_norm_mlp(
        attended.flatten(2), x, norms[1], weights[3], weights[4:], in_features[3:],
        out_features[3:], output_bias, mlp_biases, epsilon,
    )  # fmt: skip
