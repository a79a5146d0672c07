"""How far logits lie apart, and what that says about a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# How far logits may lie apart, in units of their standard deviation over the vocabulary. The first
# is a bound on rounding, in multiples of the dtype's step; the measurements are in
# docs/design/loop.md.
STEPS = 50
LEAST_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Fit:
    """Whether a cache fits a model.

    Attributes:
        difference: largest root mean square over the vocabulary of the difference of two rows of
            logits, in units of the standard deviation of the model's own row; None if not measured.
        tolerance: the largest difference that rounding explains.
        reason: why the cache does not fit, or None.
        unchecked: why nothing could be measured, or None.
        remark: what the self-check does not cover, or None.
        omitted: the kinds of forwards without a mask that were compared, see `SpecCache`.
    """

    difference: float | None = None
    tolerance: float | None = None
    reason: str | None = None
    unchecked: str | None = None
    remark: str | None = None
    omitted: frozenset[str] = frozenset()

    @property
    def not_measured(self) -> str | None:
        """Why a cache that was not refused is not known to fit, or None."""
        return self.unchecked or (self.remark if self.difference is None else None)


def distance(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`Fit.difference` of each row of logits [..., V]."""
    return (rows - own).square().mean(dim=-1).sqrt() / own.std(dim=-1)


def tolerance_of(model: Any) -> float:
    """The largest difference that rounding explains."""
    step = float(torch.finfo(_dtype_of_products(model)).eps)
    if model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        step = max(step, 2.0**-10)
    return max(LEAST_TOLERANCE, STEPS * step)


def beyond_rounding(difference: float, tolerance: float) -> str:
    """The end of a message about a difference above the tolerance."""
    return (
        f"by {difference:.2g} of their standard deviation, where rounding explains {tolerance:.2g}"
    )


def coarse_arithmetic(model: Any) -> str | None:
    """In what a model's products are made, where that is coarser than float32.

    Forwards of other widths then round otherwise, and often enough for another token.
    """
    dtype = _dtype_of_products(model)
    if dtype in (torch.bfloat16, torch.float16):
        return str(dtype).removeprefix("torch.")
    if model.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "TF32"
    return None


def _dtype_of_products(model: Any) -> torch.dtype:
    kind = model.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return model.dtype  # type: ignore[no-any-return]
