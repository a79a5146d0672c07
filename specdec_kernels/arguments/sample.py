"""The arguments of `specdec_kernels::sample` by name, and their validation.

csrc/arguments/sample.cpp validates the same with the same messages.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments.checks import (
    check_entries,
    check_number,
    check_rows,
    check_vector,
    float32,
    require,
    shape,
)
from specdec_kernels.arguments.rules import METHODS, NOISES, Method, Noise

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

    def check(self, n: int, device: torch.device, of: str) -> None:
        """Raises RuntimeError naming the argument, the rule and the value.

        A value of a tensor that is out of range is a fault of the data: it raises nothing, and the
        op reports it as `Status.BAD_PARAMETER`.
        """
        temperature, top_p, min_p = map(float32, (self.temperature, self.top_p, self.min_p))
        if self.temperatures is not None:
            check_vector("temperature", self.temperatures, n, torch.float32, device, of)
        else:
            require(
                math.isfinite(temperature) and temperature >= 0,
                f"temperature must be finite and at least 0, got {temperature:g}",
            )
        if self.top_ks is not None:
            check_vector("top_k", self.top_ks, n, torch.int32, device, of)
        else:
            require(
                self.top_k >= 0,
                f"top_k must be at least 0 (0 keeps every token), got {self.top_k}",
            )
        if self.top_ps is not None:
            check_vector("top_p", self.top_ps, n, torch.float32, device, of)
        else:
            require(0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p:g}")
        if self.min_ps is not None:
            check_vector("min_p", self.min_ps, n, torch.float32, device, of)
        else:
            require(0 <= min_p <= 1, f"min_p must be in [0, 1], got {min_p:g}")


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

    def check(self) -> None:
        """Raises RuntimeError naming the argument, the rule and the value."""
        logits = self.logits
        require(logits.dim() == 2, f"logits must be [R, V], got {shape(logits)}")
        check_rows("logits", logits)
        check_entries("logits", "the outputs", "[R]", logits.shape[0])
        n, dev = logits.shape[0], logits.device
        self.sampling.check(n, dev, "logits")
        check_vector("seeds", self.seeds, n, torch.int64, dev, "logits")
        check_vector("positions", self.positions, n, torch.int64, dev, "logits")
        check_number("noise", self.noise, NOISES)
        check_number("method", self.method, METHODS)
        require(
            self.noise_name != "shared" or self.method_name == "gumbel",
            "method must be gumbel when noise is shared, got cdf",
        )

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
