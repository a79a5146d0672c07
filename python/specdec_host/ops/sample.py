"""Sampling from logits in one fused pass: the drafter's sampler."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec_host import _library
from specdec_host.arguments import conversion
from specdec_host.arguments.arrays import Array, Param, require_array, require_array_or_none
from specdec_host.arguments.rules import METHODS, NOISES, Method, Noise
from specdec_host.arguments.values import number_of


class Sampled(NamedTuple):
    """The result of `sample`, with the fields of `specdec_kernels.Sampled`."""

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
    token_bitmask: Array | None = None,
    seeds: Array,
    positions: Array,
    noise: Noise = "draft",
    method: Method | None = None,
) -> Sampled:
    """Sample one token for each row of logits.

    The arguments are those of `specdec_kernels.sample`, with arrays in place of tensors, and so are
    the bits of the results. specdec_kernels/ops/sample.py documents both.

    Raises:
        RuntimeError: a shape, dtype or scalar is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of an array.
        ValueError: an array of sampling parameters has no dimension, or top_k a dtype that is not
            int32 or int64.

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
            require_array_or_none(token_bitmask, "token_bitmask"),
            *draws,
            number_of(noise, "noise", NOISES),
            number_of(method, "method", METHODS),
        )
    )
