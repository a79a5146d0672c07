"""Seeds and positions of the ops from the generators, seeds and offsets that other projects take.

Row r of a call draws from the Philox key `seed * GOLDEN + r`, at positions that start at
`offset * 2**16`. So rows and calls with different (seed, offset) have noise of their own, and a
call may use 2**16 positions. A function that samples uses the first of them, one that verifies the
others: drafts may be drawn with the seed and offset of their verification.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..arguments import conversion
from ..arguments.checks import device_name, dtype_name, shape

# 2**64 / golden ratio, odd, as int64: the keys of seeds that are near each other are far apart.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_OFFSET_BITS = 16
_WORDS = (torch.int64, torch.uint64)


def draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """[1] int64 on `device`, drawn from the generator or, if None, from the device's default one.

    The state of the generator advances. Nothing is read on the host.
    """
    drawn_on = device if generator is None else generator.device
    limit = 2**63 - 1
    seed = torch.randint(-limit - 1, limit, (1,), generator=generator, device=drawn_on)
    return seed.to(device)


def seeds_and_positions(
    rows: int,
    device: torch.device,
    generator: torch.Generator | None,
    seed: int | Tensor | None,
    offset: int | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The `seeds` and `positions`, [rows] int64 each, for one call of an op.

    Args:
        rows: how many sequences or rows the call has.
        device: of the rows.
        generator: draws the seed if `seed` or `offset` is None.
        seed, offset: both integers, or both tensors [1] or [rows] of int64 or uint64.

    Raises:
        ValueError: only one of seed and offset is a tensor, or a tensor has another form.
        TypeError: seed or offset is no integer.
    """
    if seed is None or offset is None:
        if seed is not None or offset is not None:
            missing = "seed" if seed is None else "offset"
            warnings.warn(
                f"seed and offset are ignored, because {missing} is None: the generator draws",
                stacklevel=4,
            )
        seed, offset = draw_seed(generator, device), _one(0, device)
    elif isinstance(seed, Tensor) != isinstance(offset, Tensor):
        raise ValueError(
            "seed and offset must both be tensors or both be integers, "
            f"got {type(seed).__name__} and {type(offset).__name__}"
        )
    keys = _words(seed, "seed", rows, device) * GOLDEN + torch.arange(rows, device=device)
    return keys, (_words(offset, "offset", rows, device) << _OFFSET_BITS).expand(rows)


def _one(value: int, device: torch.device) -> Tensor:
    """[1] int64 with the low 64 bits of an integer."""
    signed = (value + 2**63) % 2**64 - 2**63
    return torch.full((1,), signed, dtype=torch.int64, device=device)


def _words(value: int | Tensor, name: str, rows: int, device: torch.device) -> Tensor:
    """[1] or [rows] int64."""
    if not isinstance(value, Tensor):
        conversion.require_integer(value, name)
        return _one(int(value), device)
    if value.device != device:
        raise ValueError(
            f"{name} must be on the device of the rows, {device_name(device)}, "
            f"got {device_name(value.device)}"
        )
    if value.dtype not in _WORDS:
        raise ValueError(f"{name} must be int64 or uint64, got {dtype_name(value.dtype)}")
    if value.dim() != 1 or value.shape[0] not in (1, rows):
        raise ValueError(f"{name} must be [1] or [{rows}], got {shape(value)}")
    return value.view(torch.int64)
