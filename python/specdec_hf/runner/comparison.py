"""Do two ways of running a model compute the same? Their logits are compared."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

# How far logits may lie apart, in units of their standard deviation over the vocabulary. The first
# is a bound on rounding, in multiples of the dtype's step; the measurements are in
# docs/design/loop.md.
STEPS = 50
LEAST_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Comparison:
    """How far rows of logits lie from those that they should be.

    Attributes:
        difference: largest root mean square over the vocabulary of the difference of two rows, in
            units of the standard deviation of the row that it should be; infinite where it is NaN.
        tolerance: the largest difference that rounding explains.
    """

    difference: float
    tolerance: float

    @property
    def fault(self) -> str | None:
        """The end of a message about a difference above the tolerance, or None."""
        if self.difference <= self.tolerance:
            return None
        return (
            f"by {self.difference:.2g} of their standard deviation, where rounding explains "
            f"{self.tolerance:.2g}"
        )


def compare(
    rows: Iterable[torch.Tensor], own: Iterable[torch.Tensor], tolerance: float
) -> Comparison:
    """Compare logits [..., V] with those that they should be, tensor by tensor."""
    difference = 0.0
    for got, want in zip(rows, own, strict=True):
        row, wanted = got.float(), want.float()
        apart = (row - wanted).square().mean(dim=-1).sqrt() / wanted.std(dim=-1)
        # Equal rows may have no deviation to measure by.
        largest = float(apart.masked_fill((row == wanted).all(dim=-1), 0).max())
        # NaN is a difference too, and max() would drop it.
        difference = math.inf if math.isnan(largest) else max(difference, largest)
    return Comparison(difference, tolerance)


@dataclass(frozen=True)
class CacheCheck:
    """Whether a model says through a cache, or run in another way, what it says itself.

    Attributes:
        difference: as in `Comparison`; None if not measured.
        tolerance: the largest difference that rounding explains.
        reason: why it does not, or None.
        unchecked: why nothing could be measured, or None.
        remark: what the self-check does not cover, or None.
        omitted: the kinds of forwards without a mask that were compared, see `SpecRunner`.
    """

    difference: float | None = None
    tolerance: float | None = None
    reason: str | None = None
    unchecked: str | None = None
    remark: str | None = None
    omitted: frozenset[str] = frozenset()

    @property
    def not_measured(self) -> str | None:
        """Why a cache that was not refused was not compared, or None."""
        return self.unchecked or (self.remark if self.difference is None else None)


def tolerance_of(model: Any) -> float:
    """The largest difference that rounding explains."""
    step = float(torch.finfo(_dtype_of_products(model)).eps)
    if model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        step = max(step, 2.0**-10)
    return max(LEAST_TOLERANCE, STEPS * step)


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


_checks: dict[Hashable, dict[Hashable, CacheCheck]] = {}


def checks_of(model: Any) -> dict[Hashable, CacheCheck]:
    """The results of comparisons, which hold for all models of one class and configuration."""
    return _checks.setdefault((*_configuration(model), coarse_arithmetic(model)), {})


def forget_checks() -> None:
    """Forget all results of comparisons, so that each is made again."""
    _checks.clear()


def _configuration(model: Any) -> tuple[Any, ...]:
    """A key of the model's class, modules and configuration; it holds no weights and no model."""
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        config.pop(name, None)
    # The classes of the modules tell apart quantized, adapted and patched models, and their numbers
    # those whose layers share one.
    modules = frozenset(Counter(type(module) for module in model.modules()).items())
    patched = getattr(model.__dict__.get("forward"), "__code__", None)
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    return (
        type(model), modules, patched, attention, model.dtype, model.device.type,
        json.dumps(config, sort_keys=True, default=str),
    )  # fmt: skip
