"""Specification of `specdec_kernels::sample`."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import _checks
from specdec_kernels.reference.law import (
    BAD_PARAMETER,
    TARGET_NOT_FINITE,
    Law,
    at,
    exponentials,
    finite,
    pick,
    race,
    uniform,
    valid,
)


def sample(
    logits: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    top_ks: Tensor | None,
    top_k: int,
    top_ps: Tensor | None,
    top_p: float,
    min_ps: Tensor | None,
    min_p: float,
    seeds: Tensor,
    positions: Tensor,
    stream: str,
    method: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Specification of `specdec_kernels::sample`."""
    _checks.sample(
        logits, temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p,
        seeds, positions, stream, method,
    )  # fmt: skip
    n, v = logits.shape
    tokens = torch.full((n,), -1, dtype=torch.int64)
    logprobs, thresholds = torch.zeros(n), torch.zeros(n)
    logsumexp = torch.zeros(n, dtype=torch.float64)
    status = torch.zeros(n, dtype=torch.int32)
    number = _checks.STREAMS[stream]
    for r in range(n):
        k = top_k if top_ks is None else int(top_ks[r])
        params = (
            at(temperatures, temperature, r), k, at(top_ps, top_p, r), at(min_ps, min_p, r)
        )  # fmt: skip
        row = logits[r].double()
        if not valid(*params):
            status[r] = BAD_PARAMETER
            continue
        if not finite(row):
            status[r] = TARGET_NOT_FINITE
            continue
        law = Law(row, *params)
        seed, position = int(seeds[r]), int(positions[r])
        if params[0] == 0:
            token = int(row.argmax())
        elif method == "race":
            token = race(law.logprobs, exponentials(seed, position, number, v))
        else:
            token = pick(law.probs, uniform(seed, position, number))
        tokens[r], logprobs[r] = token, law.logprobs[token]
        logsumexp[r], thresholds[r] = law.logsumexp, law.threshold
    return tokens, logprobs, logsumexp, thresholds, status
