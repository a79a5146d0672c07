"""Sampling parameters and seeds: checked values for the fused ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig


class Parameter(NamedTuple):
    """A sampling parameter: the value that changes nothing, and the rule that values must keep."""

    neutral: float | int
    rule: str
    holds: Callable[[Any], bool]


PARAMETERS = {
    "temperature": Parameter(1.0, "finite and >= 0", lambda x: math.isfinite(x) and x >= 0),
    "top_k": Parameter(0, "an integer >= 0", lambda x: x >= 0 and x == int(x)),
    "top_p": Parameter(1.0, "in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": Parameter(0.0, "in [0, 1]", lambda x: 0 <= x <= 1),
}


@dataclass
class Sampling:
    """Sampling parameters of the fused ops: scalars, or tensors [B] on the model's device."""

    temperature: float | torch.Tensor
    top_k: int | torch.Tensor
    top_p: float | torch.Tensor
    min_p: float | torch.Tensor

    def to_dict(self) -> dict[str, Any]:
        """As keyword arguments of the ops."""
        return {name: getattr(self, name) for name in PARAMETERS}


def is_per_sequence(value: Any) -> bool:
    """Whether a sampling parameter was given as one value per sequence."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 1
    return isinstance(value, list | tuple)


def make_sampling(
    config: GenerationConfig,
    given: dict[str, Any],
    do_sample: bool,
    batch_size: int,
    device: torch.device,
) -> Sampling:
    """Checked sampling parameters; without ``do_sample`` temperature 0 and no filters.

    Raises:
        TypeError: a value that is no number, by name.
        ValueError: a value out of range, by name.
    """
    checked: dict[str, Any] = {}
    for name, parameter in PARAMETERS.items():
        value: Any = given.get(name, getattr(config, name, None))
        if isinstance(value, torch.Tensor | np.ndarray):
            value = value.tolist()
        if value is None:
            value = parameter.neutral
        per_sequence = isinstance(value, list | tuple)
        listed = list(value) if per_sequence else [value]
        if per_sequence and len(listed) != batch_size:
            raise ValueError(
                f"{name} must be a scalar or have {batch_size} entries, got {len(listed)}"
            )
        for x in listed:
            message = f"{name} must be {parameter.rule}, got {x!r}"
            try:
                valid = parameter.holds(x)
            except TypeError as error:
                raise TypeError(message) from error
            except (ValueError, OverflowError):  # int(x) of a number that is not finite
                valid = False
            if not valid:
                raise ValueError(message)
        kind = type(parameter.neutral)
        dtype = torch.int32 if kind is int else torch.float32
        if per_sequence and kind is int:
            listed = [min(int(x), 2**31 - 1) for x in listed]  # no vocabulary is larger
        checked[name] = (
            torch.tensor(listed, dtype=dtype, device=device) if per_sequence else kind(value)
        )
    return Sampling(**checked) if do_sample else Sampling(0.0, 0, 1.0, 0.0)


def sequence_seeds(seed: Any, batch_size: int) -> list[int]:
    """One seed per sequence; an int is the seed of all of them.

    Raises:
        TypeError: neither an int nor a sequence of them.
        ValueError: a seed of more than 64 bits, or not one per sequence.
    """
    if isinstance(seed, torch.Tensor | np.ndarray):
        seed = seed.tolist()
    per_sequence = isinstance(seed, list | tuple)
    listed = list(seed) if per_sequence else [seed]
    if not all(isinstance(s, Integral) and not isinstance(s, bool) for s in listed):
        raise TypeError(f"seed must be an int or one int per sequence, got {seed!r}")
    if per_sequence and len(listed) != batch_size:
        raise ValueError(f"seed must be an int or have {batch_size} entries, got {len(listed)}")
    for s in listed:
        if not -(2**63) <= s < 2**63:
            raise ValueError(f"seed must be in [-2**63, 2**63), got {s}")
    return [int(s) for s in listed] * (1 if per_sequence else batch_size)
