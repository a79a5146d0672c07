"""The formats of blocks in which a GGUF file stores weights."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from .._library import cpu_capability

_WIDTHS = {"avx512": 32, "avx2": 16, "plain": 8}


# The types of GGUF tensors whose blocks are read.
Format = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
BLOCK_FORMATS: tuple[str, ...] = get_args(Format)


class BlockFormat(NamedTuple):
    """As in csrc/include/specdec/weight_blocks.h, where `parts` is called `scales`.

    Attributes:
        name: that of the GGUF type.
        inputs: of a block.
        parts: with scales of their own, 0 if it has none.
        bits: of an integer.
        has_minimum: whether a block has one, as parts have then.
        bias: subtracted from an integer.
        file_bytes: of a block.
    """

    name: str
    inputs: int
    parts: int
    bits: int
    has_minimum: bool
    bias: int
    file_bytes: int

    @property
    def bytes(self) -> int:
        """Of a block of one output in a panel."""
        return (2 + self.parts) * (1 + self.has_minimum) + self.inputs * self.bits // 8


# In the order of WeightFormat, which counts from 1.
FORMATS = (
    BlockFormat("Q4_0", 32, 0, 4, False, 8, 18),
    BlockFormat("Q4_1", 32, 0, 4, True, 0, 20),
    BlockFormat("Q5_0", 32, 0, 5, False, 16, 22),
    BlockFormat("Q5_1", 32, 0, 5, True, 0, 24),
    BlockFormat("Q8_0", 32, 0, 8, False, 0, 34),
    BlockFormat("Q4_K", 256, 8, 4, True, 0, 144),
    BlockFormat("Q5_K", 256, 8, 5, True, 0, 176),
    BlockFormat("Q6_K", 256, 16, 6, False, 32, 210),
)


def panel_width() -> int:
    """Outputs of a panel; see `cpu_capability`."""
    return _WIDTHS[cpu_capability()]
