"""Specification of `sample`: one token from each row of logits; see docs/rules.md#sampling."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ...arguments.sample import STREAMS, SampleArguments
from ...arguments.status import Status
from .distribution import Distribution, SequenceParams, allowed, masked, valid_logits
from .noise import exponentials, uniform


def sample(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Takes its arguments in the order of the schema."""
    a = SampleArguments(*args)
    tokens, logprobs, logsumexp, thresholds, status = a.new_outputs()
    tokens.fill_(-1)
    for output in (logprobs, logsumexp, thresholds, status):
        output.zero_()
    stream = STREAMS[a.noise_name]
    for r in range(len(tokens)):
        params = SequenceParams.of(a, r)
        bitmask = None if a.token_bitmask is None else a.token_bitmask[r]
        row = masked(a.logits[r].double(), bitmask, -math.inf)
        if not params.in_range:
            status[r] = Status.BAD_PARAMETER
            continue
        if not valid_logits(row):
            nothing = bitmask is not None and not allowed(bitmask, len(row)).any()
            status[r] = Status.NOTHING_ALLOWED if nothing else Status.TARGET_INVALID
            continue
        p = Distribution(row, *params)
        seed, position = int(a.seeds[r]), int(a.positions[r])
        if params.temperature == 0:
            token = int(row.argmax())
        elif a.method_name == "gumbel":
            token = gumbel_argmax(p.logprobs, exponentials(seed, position, stream, len(row)))
        else:
            token = pick(p.probs, uniform(seed, position, stream))
        tokens[r], logprobs[r] = token, p.logprobs[token]
        logsumexp[r], thresholds[r] = p.logsumexp, p.threshold
    return tokens, logprobs, logsumexp, thresholds, status


def pick(weights: Tensor, u: float) -> int:
    """Inverse CDF: the first index with cdf > u * total and weight > 0.

    If rounding leaves none, it is the last index with weight > 0.
    """
    cdf = weights.cumsum(0)
    hits = ((cdf > u * cdf[-1]) & (weights > 0)).nonzero()
    return int(hits[0] if len(hits) else weights.nonzero()[-1])


def gumbel_argmax(logprobs: Tensor, exponentials: Tensor) -> int:
    """Gumbel-max sampling: argmax(log P + G) with the Gumbel noise G = -log E."""
    return int((logprobs - exponentials.log()).argmax())
