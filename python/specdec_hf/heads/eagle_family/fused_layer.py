"""The decoder layer of a head on packed weights, in one op."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from specdec_hf.heads.eagle_family.layer import HeadLayer
from specdec_kernels import PackedDecoderLayer, PackedDecoderLayers, PackedLinear, decoder_layers_


class FusedLayer(nn.Module):
    """A `HeadLayer` that normalises the parts of its input, each on its own.

    Args:
        layer: with `norms_of_parts`; its weights no longer change.
        pack: packs a weight [N, K].

    Attributes:
        weights: its packed weights.
        layers: as the op takes them.
    """

    def __init__(
        self, layer: HeadLayer, norms: list[torch.Tensor],
        pack: Callable[[torch.Tensor], PackedLinear],
    ) -> None:  # fmt: skip
        super().__init__()
        projections, after = layer.qkv_proj, layer.post_attention_layernorm
        assert after.weight is not None
        assert after.eps is not None
        dtype = projections.weight.dtype
        sizes = list(layer.projected)
        qkv = [pack(rows.detach()) for rows in projections.weight.split(sizes)]
        mlp = [pack(rows.detach()) for rows in layer.gate_up_proj.weight.chunk(2)]
        mlp.append(pack(layer.down_proj.weight.detach()))
        output = pack(layer.o_proj.weight.detach())
        self.weights = [*qkv, output, *mlp]
        bias = projections.bias
        of_heads = [layer.q_norm.weight, layer.k_norm.weight] if layer.qk_norm else []
        self.layers = PackedDecoderLayers([
            PackedDecoderLayer(
                norms=[torch.stack(norms).to(dtype), after.weight.to(dtype)],
                qkv=qkv, output=output, mlp=mlp, epsilon=after.eps, scale=layer.head_dim**-0.5,
                qkv_biases=[] if bias is None else [x.detach() for x in bias.split(sizes)],
                head_norms=[weight.to(dtype) for weight in of_heads],
            )
        ])  # fmt: skip

    def run(
        self, pairs: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor], starts: torch.Tensor,
        mask: torch.Tensor | None, visible: int | None,
    ) -> torch.Tensor:  # fmt: skip
        """The hidden states [B, n, H] of n pairs, whose keys and values are written.

        Args:
            pairs: [B, n, G * H], the parts of the input side by side.
            rotary: cosines and sines [B, n, D] of their places.
            caches: keys and values [B, K, S, D], changed in place.
            starts, mask, visible: as in `PairStep.states`.
        """
        if mask is None:
            size = pairs.shape[1]
            mask = torch.ones(1, size, visible or caches[0].shape[2], dtype=torch.bool)
            mask = mask.tril() if size > 1 else mask
            mask = mask.expand(len(pairs), -1, -1)
        return decoder_layers_(pairs, self.layers, *rotary, caches, starts, mask[:, None])
