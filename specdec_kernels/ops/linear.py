"""Linear layers on the CPU, for few rows at the speed at which memory delivers their weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.validation import fake_kernel
from ..arguments.values import shown
from ..arguments.weight_blocks import panel_width


class PackedLinear(NamedTuple):
    """A weight [N, K] in panels, which the kernels of one instruction set read.

    Attributes:
        panels: [ceil(N / W), K, W], in bfloat16 [ceil(N / W), ceil(K / 2), W, 2], of the dtype of
            the weight; W is 32 with AVX-512, 16 with AVX2 and 8 without. Zero where the weight has
            ended. Of blocks uint8 [ceil(N / W), blocks of a row, W * bytes of one].
        in_features: K.
        out_features: N.
    """

    panels: Tensor
    in_features: int
    out_features: int


def pack_linear(weight: Tensor) -> PackedLinear:
    """Copy the weight of a linear layer into the layout that `packed_linear` reads.

    The copy does not follow later changes of the weight, and no gradient flows back to it. Pack
    again in a process with another `cpu_capability`.

    Args:
        weight: [N, K] float32, bfloat16 or float16 on the CPU, contiguous and not empty.

    Raises:
        RuntimeError: the shape, dtype or device is another; the message names it.
        TypeError: the weight is no tensor.

    >>> packed = pack_linear(torch.ones(3, 5))
    >>> packed.in_features, packed.out_features
    (5, 3)
    """
    conversion.require_tensor(weight, "weight")
    panels = ops.pack_linear.default(weight)
    return PackedLinear(panels, weight.shape[1], weight.shape[0])


@fake_kernel("pack_linear")
def _(weight: Tensor) -> Tensor:
    n, k = weight.shape
    width = panel_width()
    panels = -(-n // width)
    if weight.dtype == torch.bfloat16:
        return weight.new_empty((panels, -(-k // 2), width, 2))
    return weight.new_empty((panels, k, width))


def packed_linear(x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` with a packed weight: `y = x @ weight.T + bias`.

    Not differentiable: y requires no gradient, even where x or the bias does.

    The weight is read once for every 64 rows. On one machine the bits of a row of y follow from the
    row of x, the weight and the bias alone: not from the number of rows, their order or the number
    of threads. Products are summed in float32, the bias is added, and the sum is rounded once. A
    NaN or an infinity stays in its row.

    Args:
        x: [..., K] of the dtype of the weight, of any where that is in blocks, on the CPU, any
            strides.
        packed: what `pack_linear` or `pack_blocks` returned in a process with the same
            `cpu_capability`.
        bias: [N] of the dtype of x, or None.

    Returns:
        y [..., N] of the dtype of x.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names it.
        TypeError: an argument has a wrong type.

    >>> packed = pack_linear(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    >>> packed_linear(torch.tensor([[1.0, 1.0]]), packed, torch.tensor([0.0, 0.5]))
    tensor([[3.0000, 3.5000]])
    """
    if not isinstance(packed, PackedLinear):
        raise TypeError(f"packed must be a PackedLinear, got {shown(packed)}")
    conversion.require_tensors(x=x, panels=packed.panels)
    conversion.require_tensors_or_none(bias=bias)
    y: Tensor = ops.packed_linear.default(x, *packed, bias)
    return y


@fake_kernel("packed_linear")
def _(
    x: Tensor, panels: Tensor, in_features: int, out_features: int, bias: Tensor | None
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))
