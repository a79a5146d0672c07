"""Sampling parameters and seeds: checked values for the fused ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from specdec_hf.arguments import PARAMETERS, check_integer, check_value, is_integer, shown


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

    def per_sequence(self, batch_size: int, device: torch.device) -> Sampling:
        """The same as tensors [B], which nothing else holds."""
        listed = {
            name: value.tolist() if isinstance(value, torch.Tensor) else [value] * batch_size
            for name, value in self.to_dict().items()
        }
        return make_sampling(listed, True, batch_size, device)


def is_per_sequence(value: Any) -> bool:
    """Whether a sampling parameter has one value per sequence."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 1
    return isinstance(value, list | tuple)


def make_sampling(
    values: dict[str, Any],
    do_sample: bool,
    batch_size: int,
    device: torch.device,
    num_return_sequences: int = 1,
) -> Sampling:
    """Checked sampling parameters; without ``do_sample`` temperature 0 and no filters.

    A list holds one value for each sequence or, with ``num_return_sequences``, for each prompt.

    Raises:
        TypeError: a value that is no number, by name.
        ValueError: a value out of range, by name.
    """
    checked: dict[str, Any] = {}
    for name, parameter in PARAMETERS.items():
        value: Any = values.get(name)
        if isinstance(value, torch.Tensor | np.ndarray):
            value = value.tolist()
        if value is None:
            value = parameter.neutral
        per_sequence = isinstance(value, list | tuple)
        listed = list(value) if per_sequence else [value]
        if per_sequence and len(listed) * num_return_sequences == batch_size:
            listed = [x for x in listed for _ in range(num_return_sequences)]
        if per_sequence and len(listed) != batch_size:
            counts = _allowed_counts(batch_size, num_return_sequences)
            raise ValueError(f"{name} must be a scalar or have {counts} entries, got {len(listed)}")
        for x in listed:
            check_value(name, x)
        kind = type(parameter.neutral)
        dtype = torch.int32 if kind is int else torch.float32
        if per_sequence and kind is int:
            listed = [min(int(x), 2**31 - 1) for x in listed]  # no vocabulary is larger
        checked[name] = (
            torch.tensor(listed, dtype=dtype, device=device) if per_sequence else kind(value)
        )
    return Sampling(**checked) if do_sample else Sampling(0.0, 0, 1.0, 0.0)


def sequences_per_prompt(config: GenerationConfig) -> int:
    """``num_return_sequences``, checked; None is 1.

    Raises:
        TypeError: not an int.
        ValueError: below 1.
    """
    value = 1 if config.num_return_sequences is None else config.num_return_sequences
    return check_integer("num_return_sequences", value, 1)


def sequence_seeds(
    seed: Any, batch_size: int, *, do_sample: bool = True, num_return_sequences: int = 1
) -> list[int]:
    """One seed for each sequence; docs/loop.md#seeds says which.

    Args:
        seed: None, an int, or one int for each sequence or prompt.
        batch_size: number of sequences, a multiple of ``num_return_sequences``.
        do_sample: whether None draws from torch's default generator; a greedy call needs no noise,
            and its seeds are then 0.
        num_return_sequences: how many sequences that follow one another belong to one prompt.

    Raises:
        TypeError: neither None nor an int nor a sequence of them.
        ValueError: a seed of more than 64 bits, or a wrong number of them.
    """
    if seed is None:
        if not do_sample:
            return [0] * batch_size
        drawn = torch.empty(batch_size, dtype=torch.int64, device="cpu")
        return [int(s) for s in drawn.random_(-(2**63), None).tolist()]
    if isinstance(seed, torch.Tensor | np.ndarray):
        seed = seed.tolist()
    per_sequence = isinstance(seed, list | tuple)
    listed = list(seed) if per_sequence else [seed]
    if not all(is_integer(s) for s in listed):
        raise TypeError(f"seed must be an int or one int per sequence, got {shown(seed)}")
    for s in listed:
        if not -(2**63) <= s < 2**63:
            raise ValueError(f"seed must be in [-2**63, 2**63), got {s}")
    if not per_sequence:
        return [derived_seed(int(listed[0]), b) for b in range(batch_size)]
    if len(listed) == batch_size:
        return [int(s) for s in listed]
    if len(listed) * num_return_sequences == batch_size:
        return [derived_seed(int(s), k) for s in listed for k in range(num_return_sequences)]
    raise ValueError(
        f"seed must be an int or have {_allowed_counts(batch_size, num_return_sequences)} entries, "
        f"got {len(listed)}"
    )


def derived_seed(seed: int, index: int) -> int:
    """The seed of sequence ``index`` where several share one seed; sequence 0 keeps it.

    Both numbers pass through a 64-bit mixing function, so that sequences of one call have different
    seeds and those of calls with neighbouring seeds have nothing in common.

    Source: the generator SplitMix64 of Steele, Lea and Flood, OOPSLA 2014, here
    mix(mix(seed) + index).
    """
    if index == 0:
        return seed
    mixed = _mix(_mix(seed % 2**64) + index)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def _allowed_counts(batch_size: int, num_return_sequences: int) -> str:
    """How many entries a list may have, for a message."""
    if num_return_sequences == 1:
        return str(batch_size)
    return f"{batch_size // num_return_sequences} or {batch_size}"
