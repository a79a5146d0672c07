"""Weights as GGUF files store them, for `packed_linear` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.validation import fake_kernel
from ..arguments.values import number_of, shown
from ..arguments.weight_blocks import BLOCK_FORMATS, FORMATS, Format, panel_width
from .linear import PackedLinear


def pack_blocks(blocks: Tensor, format: Format) -> PackedLinear:
    """Copy a weight as a GGUF file stores it into the layout that `packed_linear` reads.

    The weight stays as small as it is in the file. `packed_linear` multiplies by the float32
    numbers that the package `gguf` gives for the blocks, and gives the bits of those packed by
    `pack_linear`; where x is bfloat16 or float16, those of the numbers rounded to it.

    Args:
        blocks: [N, bytes of a row] uint8 on the CPU, contiguous and not empty: whole blocks, of 32
            inputs each, or of 256 in a format that ends with K.
        format: one of `BLOCK_FORMATS`, the name of the type of the file's tensor.

    Raises:
        RuntimeError: the shape, dtype, device or format is another; the message names it.
        TypeError: an argument has a wrong type.

    >>> packed = pack_blocks(torch.zeros(3, 2 * 18, dtype=torch.uint8), "Q4_0")
    >>> packed.in_features, packed.out_features
    (64, 3)
    """
    conversion.require_tensor(blocks, "blocks")
    number = number_of(format, "format", BLOCK_FORMATS)
    panels = ops.pack_blocks.default(blocks, number + 1)
    inputs = panels.shape[1] * FORMATS[number].inputs
    return PackedLinear(panels, inputs, blocks.shape[0])


@fake_kernel("pack_blocks")
def _(blocks: Tensor, format: int) -> Tensor:
    kind, width = FORMATS[format - 1], panel_width()
    n, row = blocks.shape
    return blocks.new_empty((-(-n // width), row // kind.file_bytes, width * kind.bytes))


def unpack_blocks(packed: PackedLinear) -> Tensor:
    """[N, K] float32: the numbers that `packed_linear` multiplies by.

    Args:
        packed: what `pack_blocks` returned in a process with the same `cpu_capability`.

    Raises:
        RuntimeError: it holds no blocks; the message says what it holds.
        TypeError: it is no `PackedLinear`.

    >>> unpack_blocks(pack_blocks(torch.zeros(1, 18, dtype=torch.uint8), "Q4_0")).shape
    torch.Size([1, 32])
    """
    if not isinstance(packed, PackedLinear):
        raise TypeError(f"packed must be a PackedLinear, got {shown(packed)}")
    conversion.require_tensors(panels=packed.panels)
    weight: Tensor = ops.unpack_blocks.default(*packed)
    return weight


@fake_kernel("unpack_blocks")
def _(panels: Tensor, in_features: int, out_features: int) -> Tensor:
    return panels.new_empty((out_features, in_features), dtype=torch.float32)
