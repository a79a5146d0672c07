"""Weights in blocks: as the GGUF file of a model stores them, or rounded to int8 for drafts.

A file's blocks take a sixth of the bytes of float32.

The contents decide what is multiplied by blocks: a weight of a model is that of a tensor of the
file if all its bits are those that the blocks stand for, in some order of the rows (Transformers
reorders those of the queries and keys of some models). So no name is compared, and a weight that
was changed is packed as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from specdec_hf.arguments import shown
from specdec_hf.runner.packed.linear import unpacked_reason
from specdec_kernels import (
    BLOCK_FORMATS,
    PackedLinear,
    bfloat16_products,
    pack_blocks,
    unpack_blocks,
)


@dataclass
class _Stored:
    """A tensor of the file.

    Attributes:
        blocks: [N, bytes of a row] uint8, mapped.
        format: of its blocks.
        totals: by dtype, the sum of the bits of its weights, once it has been unpacked.
    """

    blocks: np.ndarray
    format: Any
    totals: dict[torch.dtype, int] = field(default_factory=dict)

    def packed(self, order: torch.Tensor | None = None) -> PackedLinear:
        """With the rows in another order."""
        rows = np.array(self.blocks) if order is None else self.blocks[order.numpy()]
        return pack_blocks(torch.from_numpy(rows), self.format)


class BlockFile:
    """The blocks of a GGUF file.

    Args:
        path: the file. It is read when a weight is first looked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fault = ""

    @cached_property
    def _tensors(self) -> dict[tuple[int, int], list[_Stored]]:
        """By [N, K]."""
        found: dict[tuple[int, int], list[_Stored]] = defaultdict(list)
        try:
            from gguf import GGUFReader  # noqa: PLC0415  # takes a while

            class Reader(GGUFReader):
                """Reads a plain array, whose views take a quarter of the time of np.memmap's."""

                @property  # type: ignore[override]
                def data(self) -> np.ndarray:
                    return self._array

                @data.setter
                def data(self, mapped: np.ndarray) -> None:
                    self._array = np.asarray(mapped)

            tensors = Reader(self.path).tensors
        except Exception as error:  # a damaged file raises whatever its reader happens to raise
            self._fault = f"it cannot be read: {str(error) or type(error).__name__}"
            return found
        for tensor in tensors:
            kind = tensor.tensor_type.name
            if kind in BLOCK_FORMATS and tensor.data.ndim == 2:
                k, n = (int(size) for size in tensor.shape)
                found[n, k].append(_Stored(tensor.data, kind))
        return found

    def pack(self, weight: torch.Tensor) -> PackedLinear | None:
        """The blocks of a weight [N, K], or None where the file has none with its numbers."""
        dtype = weight.dtype
        if not blocks_pay(dtype):
            return None
        tensors = self._tensors.get((weight.shape[0], weight.shape[1]), [])
        sums = _row_sums(weight) if tensors else torch.empty(0)
        total = int(sums.sum())
        for stored in tensors:
            if stored.totals.get(dtype, total) != total:
                continue
            packed = stored.packed()
            unpacked = unpack_blocks(packed).to(dtype)
            own = _row_sums(unpacked)
            stored.totals[dtype] = int(own.sum())
            if stored.totals[dtype] == total and not torch.equal(own, sums):
                packed = stored.packed(own.argsort()[sums.argsort().argsort()])
                unpacked = unpack_blocks(packed).to(dtype)
            if torch.equal(_bits_of(unpacked), _bits_of(weight)):
                return packed
        return None

    def report(self, stats: Any, model: Any, note: Callable[[str], None]) -> None:
        """Leave a note where linear layers of a model that was read from the file are floats.

        Args:
            stats: `PackedStats` of the model.
            note: takes it.
        """
        if stats.blocks < stats.layers and blocks_pay(model.dtype):
            why = self._fault or "their weights are not those of the file"
            note(
                f"{type(model).__name__}: {stats.layers - stats.blocks} of {stats.layers} linear "
                f"layers multiply by floats and not by the blocks of {self.path.name}: {why}"
            )


def _row_sums(weight: torch.Tensor) -> torch.Tensor:
    """[N] int64: the sum of the bits of each row of [N, K], which wraps around."""
    return _bits_of(weight).sum(dim=1, dtype=torch.int64)


def _bits_of(weight: torch.Tensor) -> torch.Tensor:
    """The bits of [N, K], in the widest integers that a view can have: those are summed faster."""
    row, begin = (n * weight.element_size() for n in (weight.shape[1], weight.storage_offset()))
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return weight.view(next(integers[n] for n in integers if row % n == begin % n == 0))


def blocks_pay(dtype: torch.dtype) -> bool:
    """Whether rows of a dtype are multiplied by blocks sooner than by panels, however many.

    Where the processor has no instruction for it, rounding unpacked numbers to bfloat16 costs more
    than the bytes that it saves.
    """
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bfloat16_products() != "floats")


DRAFT_WEIGHTS = ("int8", "float")  # the first is the default


def checked_draft_weights(value: str) -> str:
    """The value, where it is one of `DRAFT_WEIGHTS`."""
    if not isinstance(value, str):
        raise TypeError(f"draft_weights must be a string, got {shown(value)}")
    if value not in DRAFT_WEIGHTS:
        raise ValueError(f"draft_weights must be {' or '.join(DRAFT_WEIGHTS)}, got {shown(value)}")
    return value


def rounded_to_int8(weight: torch.Tensor) -> PackedLinear | None:
    """A weight [N, K] in blocks of Q8_0, each number rounded to a 127th of the largest of 32.

    None where that does not pay, its rows are no whole blocks, or a scale is not finite in float16.
    """
    n, k = weight.shape
    if not blocks_pay(weight.dtype) or k % 32:
        return None
    blocks = weight.float().view(n, k // 32, 32)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    if not bool(scale.isfinite().all()):
        return None
    numbers = (blocks / scale.float().clamp_min(2.0**-24)).round().clamp(-127, 127).to(torch.int8)
    bytes_of_blocks = torch.cat([scale.view(torch.int8), numbers], dim=-1)
    return pack_blocks(bytes_of_blocks.view(torch.uint8).flatten(1), "Q8_0")


def rounded_linear(module: Any) -> nn.Linear | None:
    """A linear layer with the numbers that the blocks of `rounded_to_int8` stand for."""
    blocks = None
    if unpacked_reason(module) is None:
        blocks = rounded_to_int8(module.weight.detach())
    if blocks is None:
        return None
    layer = nn.Linear(blocks.in_features, blocks.out_features, device="meta")
    weight = unpack_blocks(blocks).to(module.weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = module.bias
    return layer
