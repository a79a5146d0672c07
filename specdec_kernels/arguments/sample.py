"""The arguments of `specdec_kernels::sample` by name."""

from __future__ import annotations

import torch
from torch import Tensor

from .rules import METHODS, NOISES, Method, Noise
from .schema import OpArguments, named_by_schema

# The numbers of the noise streams in Philox's counter: csrc/include/specdec/noise.h.
STREAMS: dict[Noise, int] = {noise: number for number, noise in enumerate(NOISES, start=1)}


class SamplingArguments(OpArguments):
    """The sampling parameters, which every op that reads logits takes.

    Each comes as a tensor with one value for each sequence or, where that is None, as a scalar.
    """

    temperatures: Tensor | None
    temperature: float
    top_ks: Tensor | None
    top_k: int
    top_ps: Tensor | None
    top_p: float
    min_ps: Tensor | None
    min_p: float


@named_by_schema("sample")
class SampleArguments(SamplingArguments):
    """Shapes as in csrc/include/specdec/sample.h."""

    logits: Tensor
    token_bitmask: Tensor | None
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
