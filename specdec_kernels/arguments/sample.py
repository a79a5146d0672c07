"""The arguments of `specdec_kernels::sample` by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rules import METHODS, NOISES, Method, Noise

# The numbers of the noise streams in Philox's counter: csrc/include/specdec/noise.h.
STREAMS: dict[Noise, int] = {noise: number for number, noise in enumerate(NOISES, start=1)}


class SamplingArguments(NamedTuple):
    """The sampling parameters, which every op that reads logits takes; the defaults change nothing.

    Each comes as a tensor with one value for each sequence or, where that is None, as a scalar.
    """

    temperatures: Tensor | None = None
    temperature: float = 1.0
    top_ks: Tensor | None = None
    top_k: int = 0
    top_ps: Tensor | None = None
    top_p: float = 1.0
    min_ps: Tensor | None = None
    min_p: float = 0.0

    @classmethod
    def of(cls, arguments: Any) -> SamplingArguments:
        """Those among the arguments of an op, which have the same names there."""
        return cls(**{name: getattr(arguments, name) for name in cls._fields})


class SampleArguments(NamedTuple):
    """In the order of the schema."""

    logits: Tensor
    temperatures: Tensor | None
    temperature: float
    top_ks: Tensor | None
    top_k: int
    top_ps: Tensor | None
    top_p: float
    min_ps: Tensor | None
    min_p: float
    seeds: Tensor
    positions: Tensor
    noise: int
    method: int

    @property
    def noise_name(self) -> Noise:
        return NOISES[self.noise]

    @property
    def method_name(self) -> Method:
        return METHODS[self.method]

    @property
    def sampling(self) -> SamplingArguments:
        return SamplingArguments.of(self)

    def new_outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Uninitialised (tokens, logprobs, logsumexp, threshold, status)."""
        like, n = self.logits, self.logits.shape[:1]
        return (
            like.new_empty(n, dtype=torch.int64),
            like.new_empty(n, dtype=torch.float32),
            like.new_empty(n, dtype=torch.float64),
            like.new_empty(n, dtype=torch.float32),
            like.new_empty(n, dtype=torch.int32),
        )
