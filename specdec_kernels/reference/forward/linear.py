"""Specification of `pack_linear` and `packed_linear`: a linear layer, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...arguments.weight_blocks import panel_width
from .weight_blocks import unpack_blocks


def pack_linear(weight: Tensor) -> Tensor:
    """The weight in panels of W outputs; neighbouring inputs of bfloat16 lie together."""
    n, k = weight.shape
    width = panel_width()
    inputs = 2 if weight.dtype == torch.bfloat16 else 1
    panels, steps = -(-n // width), -(-k // inputs)
    padded = weight.new_zeros(panels * width, steps * inputs)
    padded[:n, :k] = weight
    packed = padded.view(panels, width, steps, inputs).transpose(1, 2).contiguous()
    return packed if inputs == 2 else packed.squeeze(3)


def packed_linear(
    x: Tensor, panels: Tensor, in_features: int, out_features: int, bias: Tensor | None
) -> Tensor:
    """The product of x with the weight that the panels hold, and the bias."""
    if panels.dtype == torch.uint8:
        wide = unpack_blocks(panels, in_features, out_features).to(x.dtype).double()
    else:
        wide = panels.double().view(*panels.shape[:3], -1).transpose(1, 2).flatten(0, 1).flatten(1)
    y = x.double() @ wide[:out_features, :in_features].T
    return (y if bias is None else y + bias.double()).to(x.dtype)
