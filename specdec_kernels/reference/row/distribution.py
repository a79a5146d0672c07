"""Noise, filters and the law of one row, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec_kernels.arguments.sample import SamplingArguments

TARGET_NOT_FINITE, DRAFT_NOT_FINITE, EMPTY_RESIDUAL, DRAFT_OUT_OF_RANGE, BAD_PARAMETER = (
    1 << bit for bit in range(5)
)
ACCEPT, RESIDUAL, DRAFT, SHARED = range(4)
TAIL = 256

Shaping = tuple[float, int, float, float]


def philox(seed: int, lane: int, position: int, stream: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011); key = seed, counter = (lane, position, stream)."""
    mask = 0xFFFFFFFF
    c = [lane & mask, position & mask, (position >> 32) & mask, stream]
    key = [seed & mask, (seed >> 32) & mask]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c[0], c[1], c[2], c[3]


def uniform(seed: int, position: int, stream: int, lane: int = 0) -> float:
    """53 bits in [0, 1) from words 0 (low) and 1 (high) of a lane."""
    words = philox(seed, lane, position, stream)
    return ((words[0] | words[1] << 32) >> 11) * 2.0**-53


def exponentials(seed: int, position: int, stream: int, size: int) -> Tensor:
    """[size] float64, unit exponentials with a tail down to 2^-65 (ALGORITHMS section 4)."""
    out = torch.empty(size, dtype=torch.float64)
    for v in range(size):
        x = philox(seed, v // 4, position, stream)[v % 4]
        u = (x + 0.5) * 2.0**-32
        if x < 256:
            u = (
                x * 2.0**32 + philox(seed, v // 4, position, stream + TAIL)[v % 4] + 0.5
            ) * 2.0**-64
        out[v] = -math.log1p(-u)
    return out


def threshold(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """Smallest surviving logit of one float64 row [V]: top-k, top-p of the rest, min-p."""
    v = logits.numel()
    keep = -math.inf
    ordered = logits.sort(descending=True).values
    if 0 < top_k < v:
        keep = float(ordered[top_k - 1])
    if top_p < 1:
        ordered = ordered[ordered >= keep]
        mass = torch.exp((ordered - ordered[0]) / temperature).cumsum(0)
        first = int((mass >= top_p * mass[-1]).nonzero()[0])
        keep = float(ordered[first])
    if min_p > 0:
        keep = max(keep, float(logits.max()) + temperature * math.log(min_p))
    return keep


class Distribution:
    """One row's law: `probs` [V] float64, or a point mass at the argmax at temperature 0."""

    def __init__(
        self, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> None:
        self.logits = logits
        self.temperature = temperature
        top = float(logits.max())
        if temperature == 0:
            self.threshold, self.logsumexp = top, 0.0
            self.logprobs = torch.full_like(logits, -math.inf)
            self.logprobs[int(logits.argmax())] = 0.0
        else:
            self.threshold = threshold(logits, temperature, top_k, top_p, min_p)
            # About the maximum: the sum of equals at 3e38 would vanish beside them.
            above = torch.where(logits >= self.threshold, (logits - top) / temperature, -math.inf)
            total = float(above.logsumexp(0))
            self.logsumexp = top / temperature + total
            self.logprobs = above - total
        self.probs = self.logprobs.exp()


def finite(row: Tensor) -> bool:
    """Logits may hold -inf, never NaN, +inf or nothing but -inf."""
    return not bool(row.isnan().any()) and math.isfinite(float(row.max()))


def pick(weights: Tensor, u: float) -> int:
    """Inverse CDF: first index with cdf > u * total and weight > 0, else the last with weight."""
    cdf = weights.cumsum(0)
    hits = ((cdf > u * cdf[-1]) & (weights > 0)).nonzero()
    return int(hits[0] if len(hits) else weights.nonzero()[-1])


def gumbel_argmax(logprobs: Tensor, noise: Tensor) -> int:
    """argmax(log P + G), G = -log E."""
    return int((logprobs - noise.log()).argmax())


def at(tensor: Tensor | None, scalar: float, b: int) -> float:
    # Scalars reach the kernels as float32, so that a scalar and a filled tensor agree.
    value = float(torch.tensor(scalar, dtype=torch.float32)) if tensor is None else float(tensor[b])
    return value


def parameters(sampling: SamplingArguments, b: int) -> Shaping:
    """(temperature, top_k, top_p, min_p) of a sequence or row."""
    s = sampling
    k = s.top_k if s.top_ks is None else int(s.top_ks[b])
    temperature = at(s.temperatures, s.temperature, b)
    return temperature, k, at(s.top_ps, s.top_p, b), at(s.min_ps, s.min_p, b)


def valid(temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    return (
        math.isfinite(temperature)
        and temperature >= 0
        and top_k >= 0
        and 0 < top_p <= 1
        and 0 <= min_p <= 1
    )
