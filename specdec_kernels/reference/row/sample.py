"""Specification of `specdec_kernels::sample`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specdec_kernels.arguments.sample import STREAMS, SampleArguments
from specdec_kernels.reference.row.distribution import (
    BAD_PARAMETER,
    TARGET_NOT_FINITE,
    Distribution,
    exponentials,
    finite,
    gumbel_argmax,
    parameters,
    pick,
    uniform,
    valid,
)


def sample(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments in the order of `SampleArguments`."""
    a = SampleArguments(*args)
    a.check()
    tokens, logprobs, logsumexp, thresholds, status = a.new_outputs()
    tokens.fill_(-1)
    for output in (logprobs, logsumexp, thresholds, status):
        output.zero_()
    number = STREAMS[a.noise]
    for r in range(len(tokens)):
        params = parameters(a.sampling, r)
        row = a.logits[r].double()
        if not valid(*params):
            status[r] = BAD_PARAMETER
            continue
        if not finite(row):
            status[r] = TARGET_NOT_FINITE
            continue
        law = Distribution(row, *params)
        seed, position = int(a.seeds[r]), int(a.positions[r])
        if params[0] == 0:
            token = int(row.argmax())
        elif a.method == "gumbel":
            token = gumbel_argmax(law.logprobs, exponentials(seed, position, number, len(row)))
        else:
            token = pick(law.probs, uniform(seed, position, number))
        tokens[r], logprobs[r] = token, law.logprobs[token]
        logsumexp[r], thresholds[r] = law.logsumexp, law.threshold
    return tokens, logprobs, logsumexp, thresholds, status
