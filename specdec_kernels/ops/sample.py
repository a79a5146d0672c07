"""One fused sampling pass over logits: the drafter's sampler."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments import conversion as _params
from specdec_kernels.arguments.conversion import Param
from specdec_kernels.arguments.sample import SampleArguments

Noise = Literal["draft", "residual", "shared"]
Method = Literal["cdf", "gumbel"]


class Sampled(NamedTuple):
    """What `sample` returns; `R` rows.

    tokens: [R] int64, -1 where the row cannot be sampled (see status).
    logprobs: [R] float32, of the token under the filtered law; 0 at temperature 0.
    logsumexp: [R] float64, of logits / temperature over the survivors; 0 at temperature 0.
    threshold: [R] float32, in units of the raw logits: survivors are `logit >= threshold`.
    status: [R] int32, bit 0 row not finite, bit 4 sampling parameter out of range.

    With the last three, `P(v) = exp(logits[v] / temperature - logsumexp)` where
    `logits[v] >= threshold`, else 0: the exact law the token was drawn from.
    """

    tokens: Tensor
    logprobs: Tensor
    logsumexp: Tensor
    threshold: Tensor
    status: Tensor


def sample(
    logits: Tensor,
    *,
    temperature: Param = 1.0,
    top_k: int | Tensor = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    seeds: Tensor,
    positions: Tensor,
    noise: Noise = "draft",
    method: Method | None = None,
) -> Sampled:
    """Sample one token a row from filtered logits. Not differentiable.

    Args:
        logits: [R, V] float32, bfloat16 or float16; the last dimension contiguous.
        temperature: scalar or [R]; 0 takes the argmax (lowest id on ties).
        top_k: scalar or [R]; keep the k largest and their ties, 0 keeps all.
        top_p: scalar or [R] in (0, 1]; of what top_k left, the smallest set of largest
            probabilities whose mass reaches top_p, with ties.
        min_p: scalar or [R] in [0, 1]; keep `p >= min_p * max(p)`.
        seeds, positions: [R] int64; the token depends on them and on the row alone.
        noise: which independent noise to use; "shared" is that of rule `match`.
        method: "cdf" (inverse CDF of one uniform) or "gumbel" (Gumbel). None is "gumbel" for the
            shared stream, which knows no other, and "cdf" elsewhere.

    Raises:
        RuntimeError: a shape, dtype, device or scalar out of range, with its name and value.
        ValueError: an argument of a wrong type.

    Source: inverse CDF in two levels; Gumbel race as in Daliri et al., arXiv 2408.07978.

    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
    >>> one = torch.zeros(1, dtype=torch.int64)
    >>> sample(logits, temperature=0.0, seeds=one, positions=one).tokens
    tensor([1])
    """
    _params.tensors(logits=logits, seeds=seeds, positions=positions)
    if method is None:
        method = "gumbel" if noise == "shared" else "cdf"
    return Sampled(
        *torch.ops.specdec_kernels.sample.default(
            logits,
            *_params.sampling(temperature, top_k, top_p, min_p),
            seeds,
            positions,
            noise,
            method,
        )
    )


@torch.library.register_fake("specdec_kernels::sample")
def _(*args: Any) -> tuple[Tensor, ...]:
    arguments = SampleArguments(*args)
    arguments.check()
    return arguments.new_outputs()
