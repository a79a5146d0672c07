"""Sampling from logits in one fused pass: the drafter's sampler."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec_host import _library
from specdec_host.arguments import conversion
from specdec_host.arguments.arrays import Array, Param, require_array
from specdec_host.arguments.rules import METHODS, NOISES, Method, Noise


class Sampled(NamedTuple):
    """The result of `sample` for R rows.

    tokens: [R] int64, -1 where the row cannot be sampled (see status).
    logprobs: [R] float32, the log-probability of the token after all filters; 0 at temperature 0.
    logsumexp: [R] float64, log(sum(exp(logits / temperature))) over the tokens that pass the
        filters; 0 at temperature 0.
    threshold: [R] float32, in units of the raw logits: those tokens have `logit >= threshold`.
    status: [R] int32, the `Status` bits of each row; 0 where its data has no fault.

    logsumexp and threshold describe the distribution that the token was sampled from. Pass them to
    `verify_chain` in a `SampledDraft`.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    logsumexp: NDArray[np.float64]
    threshold: NDArray[np.float32]
    status: NDArray[np.int32]


def sample(
    logits: Array,
    *,
    temperature: Param = 1.0,
    top_k: int | Array = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    seeds: Array,
    positions: Array,
    noise: Noise = "draft",
    method: Method | None = None,
) -> Sampled:
    """Sample one token for each row of logits.

    Args:
        logits: [R, V] float32, bfloat16 or float16; the last dimension must be contiguous.
        temperature: scalar or [R]; 0 takes the argmax (lowest id on ties).
        top_k: scalar or [R]; keeps the k largest logits and their ties, 0 keeps all.
        top_p: scalar or [R] in (0, 1]; of the tokens that top_k kept, keeps the smallest set of
            largest probabilities whose sum reaches top_p, with ties.
        min_p: scalar or [R] in [0, 1]; keeps `p >= min_p * max(p)`.
        seeds: [R] int32 or int64.
        positions: [R] int32 or int64, the absolute index of the token that is sampled;
            `draft_positions` gives those of drafts.
        noise: the noise stream: "draft" is for drafters, "residual" is that of recovered and bonus
            tokens, and "shared" is for drafts that rule `match` verifies.
        method: "cdf" (inverse CDF of one uniform) or "gumbel" (Gumbel-max sampling). None means
            "gumbel" for the shared noise, which allows no other, and "cdf" otherwise.

    Raises:
        RuntimeError: a shape, dtype or scalar is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of an array.
        ValueError: an array of sampling parameters has no dimension, or top_k a dtype that is not
            int32 or int64.

    Source: docs/rules.md#sampling; for the shared Gumbel noise, Daliri et al., arXiv 2408.07978.

    >>> one = np.zeros(1, dtype=np.int64)
    >>> logits = np.array([[0.0, 2.0, 1.0]], dtype=np.float32)
    >>> sample(logits, temperature=0.0, seeds=one, positions=one).tokens.tolist()
    [1]
    """
    if method is None:
        method = "gumbel" if noise == "shared" else "cdf"
    rows: NDArray[Any] = require_array(logits, "logits")
    draws = require_array(seeds, "seeds"), require_array(positions, "positions")
    return Sampled(
        *_library.sample(
            rows,
            *conversion.sampling(temperature, top_k, top_p, min_p),
            *draws,
            conversion.number_of(noise, "noise", NOISES),
            conversion.number_of(method, "method", METHODS),
        )
    )
