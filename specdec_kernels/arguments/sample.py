"""The arguments of `specdec_kernels::sample` by name, and their checks.

csrc/torch/sample.cpp makes the same checks with the same words; tests/test_errors.py holds the two
together by the table in tests/error_table.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments.checks import float32, one_of, require, rows, shape, vector

STREAMS = {"residual": 1, "draft": 2, "shared": 3}
METHODS = ("cdf", "gumbel")


class SamplingArguments(NamedTuple):
    """Those that shape a law, of every op; off as they stand here."""

    temperatures: Tensor | None = None
    temperature: float = 1.0
    top_ks: Tensor | None = None
    top_k: int = 0
    top_ps: Tensor | None = None
    top_p: float = 1.0
    min_ps: Tensor | None = None
    min_p: float = 0.0

    def check(self, n: int, device: torch.device, of: str) -> None:
        """A tensor wins over its scalar; scalars are range checked, tensor values are data."""
        temperature, top_p, min_p = map(float32, (self.temperature, self.top_p, self.min_p))
        if self.temperatures is not None:
            vector("temperature", self.temperatures, n, torch.float32, device, of)
        else:
            require(
                math.isfinite(temperature) and temperature >= 0,
                f"temperature must be finite and at least 0, got {temperature:g}",
            )
        if self.top_ks is not None:
            vector("top_k", self.top_ks, n, torch.int32, device, of)
        else:
            require(
                self.top_k >= 0,
                f"top_k must be at least 0 (0 keeps every token), got {self.top_k}",
            )
        if self.top_ps is not None:
            vector("top_p", self.top_ps, n, torch.float32, device, of)
        else:
            require(0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p:g}")
        if self.min_ps is not None:
            vector("min_p", self.min_ps, n, torch.float32, device, of)
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
    noise: str
    method: str

    @property
    def sampling(self) -> SamplingArguments:
        return SamplingArguments(*self[1:9])

    def check(self) -> None:
        """Raises RuntimeError naming the argument, the rule and the value."""
        logits = self.logits
        require(logits.dim() == 2, f"logits must be [R, V], got {shape(logits)}")
        rows("logits", logits)
        n, dev = logits.shape[0], logits.device
        self.sampling.check(n, dev, "logits")
        vector("seeds", self.seeds, n, torch.int64, dev, "logits")
        vector("positions", self.positions, n, torch.int64, dev, "logits")
        one_of("noise", self.noise, tuple(STREAMS))
        one_of("method", self.method, METHODS)
        require(
            self.noise != "shared" or self.method == "gumbel",
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
