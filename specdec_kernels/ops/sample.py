"""Sampling from logits in one fused pass: the drafter's sampler.

A *row* is one vector of logits over the vocabulary. Its *sampling parameters* are temperature,
top-k, top-p and min-p, applied in this order; tokens that pass all filters are the *survivors*.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.conversion import Param
from ..arguments.out import write_out
from ..arguments.rules import METHODS, NOISES, Method, Noise
from ..arguments.sample import SampleArguments
from ..arguments.validation import fake_kernel
from ..arguments.values import number_of


class Sampled(NamedTuple):
    """The result of `sample` for R rows.

    Attributes:
        tokens: [R] int64, -1 where the row cannot be sampled (see status).
        logprobs: [R] float32, the log-probability of the token after all filters; 0 at temperature
            0.
        logsumexp: [R] float64, log(sum(exp(logits / temperature))) over the survivors; 0 at
            temperature 0.
        threshold: [R] float32, in units of the raw logits: survivors have `logit >= threshold`.
        status: [R] int32, `Status.TARGET_INVALID` if the row holds no distribution,
            `Status.NOTHING_ALLOWED` if no token of it is allowed, `Status.BAD_PARAMETER` if a
            sampling parameter is out of range, otherwise 0.

    Above temperature 0, logsumexp and threshold describe exactly the distribution that the token
    was sampled from: `P(v) = exp(logits[v] / temperature - logsumexp)` where `logits[v] >=
    threshold`, else 0. Pass them to `verify_chain` in a `SampledDraft`.
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
    token_bitmask: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    noise: Noise = "draft",
    method: Method | None = None,
    out: Sampled | None = None,
    workspace: Tensor | None = None,
) -> Sampled:
    """Sample one token for each row of logits. Not differentiable.

    Args:
        logits: [R, V] float32, bfloat16 or float16; the last dimension must be contiguous.
        temperature: scalar or [R]; 0 takes the argmax (lowest id on ties).
        top_k: scalar or [R]; keeps the k largest logits and their ties, 0 keeps all.
        top_p: scalar or [R] in (0, 1]; of the tokens that top_k kept, keeps the smallest set of
            largest probabilities whose sum reaches top_p, with ties.
        min_p: scalar or [R] in [0, 1]; keeps `p >= min_p * max(p)`.
        token_bitmask: [R, ceil(V/32)] int32, which tokens a grammar allows in each row: bit v % 32
            of word v // 32 is that of token v, as xgrammar and llguidance write it. Others count as
            -inf before any filter, whatever their entry holds. None allows all.
        seeds: [R] int32 or int64.
        positions: [R] int32 or int64, the absolute index of the token that is sampled. Drafts need
            other positions, which `draft_positions` gives; see docs/rules.md#noise. Apart from
            `noise` and `method`, the token depends on the row, its sampling parameters, seed and
            position, and on nothing else.
        noise: the noise stream that the random numbers come from. Streams are independent of each
            other: "draft" is for drafters, "residual" is that of recovered and bonus tokens, and
            "shared" is for drafts that rule `match` verifies.
        method: "cdf" (inverse CDF of one uniform) or "gumbel" (Gumbel-max sampling). None means
            "gumbel" for the shared noise, which allows no other, and "cdf" otherwise.
        out: contiguous tensors of the shapes and dtypes of `Sampled`, in which the results are
            written and which are returned: no tensor is allocated for them. None may overlap
            another or an argument. docs/ops.md#persistent-buffers.
        workspace: uint8 of at least `sample_workspace_bytes`, for `out` on a CUDA device: the
            kernels work in it. It need not be cleared. None: the call allocates one.

    Raises:
        RuntimeError: a shape, dtype, device or scalar is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of a tensor.
        ValueError: a tensor of sampling parameters has no dimension, or top_k a dtype that is not
            int32 or int64.

    Source: docs/rules.md#sampling; for the shared Gumbel noise, Daliri et al., arXiv 2408.07978.

    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
    >>> one = torch.zeros(1, dtype=torch.int64)
    >>> sample(logits, temperature=0.0, seeds=one, positions=one).tokens
    tensor([1])
    """
    conversion.require_tensors(logits=logits, seeds=seeds, positions=positions)
    if method is None:
        method = "gumbel" if noise == "shared" else "cdf"
    arguments = (
        logits,
        *conversion.sampling(temperature, top_k, top_p, min_p),
        conversion.require_tensor_or_none(token_bitmask, "token_bitmask"),
        seeds,
        positions,
        number_of(noise, "noise", NOISES),
        number_of(method, "method", METHODS),
    )
    if out is None and workspace is None:
        return Sampled(*ops.sample.default(*arguments))
    return write_out(ops.sample_out.default, arguments, Sampled, out, workspace)


@fake_kernel("sample")
def _(*args: Any) -> tuple[Tensor, ...]:
    return SampleArguments(*args).new_outputs()


@fake_kernel("sample_out")
def _(*args: Any) -> None:
    """Nothing is returned."""
