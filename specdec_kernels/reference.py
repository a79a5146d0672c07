"""The specification in code: each op, one row at a time, in float64.

Same signatures as the ops of `torch.ops.specdec_kernels`; CPU tensors. Slow and short on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import _checks

TARGET_NOT_FINITE, DRAFT_NOT_FINITE, EMPTY_RESIDUAL, DRAFT_OUT_OF_RANGE, BAD_PARAMETER = (
    1 << bit for bit in range(5)
)
ACCEPT, RESIDUAL, DRAFT, SHARED = range(4)
TAIL = 256


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


def uniform(seed: int, position: int, stream: int) -> float:
    """53 bits in [0, 1) from words 0 (low) and 1 (high) of lane 0."""
    words = philox(seed, 0, position, stream)
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


class Law:
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


def race(logprobs: Tensor, noise: Tensor) -> int:
    """argmax(log P + G), G = -log E."""
    return int((logprobs - noise.log()).argmax())


def _at(tensor: Tensor | None, scalar: float, b: int) -> float:
    # Scalars reach the kernels as float32, so that a scalar and a filled tensor agree.
    value = float(torch.tensor(scalar, dtype=torch.float32)) if tensor is None else float(tensor[b])
    return value


def _valid(temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    return (
        math.isfinite(temperature)
        and temperature >= 0
        and top_k >= 0
        and 0 < top_p <= 1
        and 0 <= min_p <= 1
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
            _at(temperatures, temperature, r), k, _at(top_ps, top_p, r), _at(min_ps, min_p, r)
        )  # fmt: skip
        row = logits[r].double()
        if not _valid(*params):
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


def verify_chain(
    target: Tensor,
    draft_tokens: Tensor,
    draft: Tensor | None,
    draft_logsumexp: Tensor | None,
    draft_threshold: Tensor | None,
    draft_temperatures: Tensor | None,
    draft_temperature: float,
    kind: str,
    rule: str,
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
    cu_rows: Tensor | None,
    uniforms: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Specification of `specdec_kernels::verify_chain`."""
    _checks.verify_chain(
        target, draft_tokens, draft, draft_logsumexp, draft_threshold, draft_temperatures,
        draft_temperature, kind, rule, temperatures, temperature, top_ks, top_k, top_ps, top_p,
        min_ps, min_p, seeds, positions, cu_rows, uniforms,
    )  # fmt: skip
    b_size, gamma = draft_tokens.shape
    v = target.shape[-1]
    tokens = torch.full((b_size, gamma + 1), -1, dtype=draft_tokens.dtype)
    num_accepted = torch.zeros(b_size, dtype=torch.int32)
    status = torch.zeros(b_size, dtype=torch.int32)
    logprobs = torch.zeros(b_size, gamma + 1)

    for b in range(b_size):
        k = top_k if top_ks is None else int(top_ks[b])
        params = (
            _at(temperatures, temperature, b), k, _at(top_ps, top_p, b), _at(min_ps, min_p, b)
        )  # fmt: skip
        if not _valid(*params):
            status[b] = BAD_PARAMETER
            continue
        q_temperature = 0.0 if rule == "greedy" else params[0]
        if rule == "token" and draft_logsumexp is not None:
            q_temperature = _at(draft_temperatures, draft_temperature, b)
            if not (math.isfinite(q_temperature) and q_temperature >= 0):
                status[b] = BAD_PARAMETER
                continue
        if rule == "greedy":
            params = (0.0, 0, 1.0, 0.0)
        # Probabilities that need no shaping are the law itself; only visited entries are judged.
        shaped = params[0] != 1 or 0 < k < v or params[2:] != (1.0, 0.0)
        direct = kind == "probs" and rule == "token" and not shaped

        begin, rows = 0, gamma + 1
        if cu_rows is not None:
            begin = min(max(int(cu_rows[b]), 0), target.shape[0])
            rows = min(max(int(cu_rows[b + 1]), begin), target.shape[0]) - begin
        if rows == 0:
            status[b] = TARGET_NOT_FINITE
            continue
        target_rows = target[b] if cu_rows is None else target[begin : begin + rows]
        draft_rows, first = draft, 0
        if draft is not None and draft.dim() == 3:
            draft_rows = draft[b]
        elif draft is not None:
            first = begin - b

        for i in range(rows):
            x = int(draft_tokens[b, i]) if i < min(gamma, rows - 1) else -1
            if x < -1 or x >= v:
                status[b] |= DRAFT_OUT_OF_RANGE
                x = -1
            row = target_rows[i].double()
            if direct and x >= 0:
                ok = bool(row[x].isfinite()) and float(row[x]) >= 0
            elif kind == "probs":
                ok = bool(row.isfinite().all() and (row >= 0).all() and row.sum() > 0)
            else:
                ok = finite(row)
            if not ok:
                status[b] |= TARGET_NOT_FINITE
                break
            if direct:
                law = None
                p, lp = row, row.log()
            else:
                law = Law(row.log() if kind == "probs" else row, *params)
                p, lp = law.probs, law.logprobs

            seed, position = int(seeds[b]), int(positions[b]) + i
            coin = uniform(seed, position, ACCEPT)
            last = uniform(seed, position, RESIDUAL)
            if uniforms is not None:
                last = float(uniforms[b, gamma])
                coin = float(uniforms[b, i]) if i < gamma else coin

            y = -1
            if params[0] == 0:
                y = int(lp.argmax())
                accepted = x == y
            elif rule == "match":
                y = race(lp, exponentials(seed, position, SHARED, v))
                accepted = x == y
            elif x < 0:
                accepted = False
                y = pick(p, last)
            else:
                # A point mass unless a draft row says otherwise.
                q = torch.zeros(v, dtype=torch.float64)
                q[x] = 1.0
                fault = False
                if draft_rows is not None and q_temperature != 0:
                    exists = 0 <= first + i < draft_rows.shape[0]
                    d = draft_rows[first + i].double() if exists else torch.full((v,), math.nan)
                    if draft_logsumexp is not None and draft_threshold is not None:
                        total = float(draft_logsumexp[b, i])
                        seen = d[x]
                        bound = float(draft_threshold[b, i])
                        fault = not math.isfinite(total) or not seen < math.inf or math.isnan(bound)
                        survives = d >= bound
                        q = torch.where(survives, (d / q_temperature - total).exp(), 0.0)
                        whole = finite(d)
                    elif kind == "probs":
                        fault = not (math.isfinite(float(d[x])) and float(d[x]) >= 0)
                        q = d
                        whole = bool(d.isfinite().all() and (d >= 0).all())
                    else:
                        fault = not finite(d)
                        whole = not fault
                        if not fault:
                            q = Law(d, q_temperature, 0, 1.0, 0.0).probs
                else:
                    whole = True
                accepted = not fault and coin * float(q[x]) < float(p[x])
                if (
                    not accepted
                    and direct
                    and not bool(row.isfinite().all() and (row >= 0).all() and row.sum() > 0)
                ):
                    status[b] |= TARGET_NOT_FINITE
                    break
                if not accepted:
                    if fault or not whole:
                        status[b] |= DRAFT_NOT_FINITE
                        y = pick(p, last)
                    else:
                        residual = (p - q).clamp(min=0)
                        if not float(residual.sum()) > 0:
                            status[b] |= EMPTY_RESIDUAL
                            residual = p
                        y = pick(residual, last)
            emitted = x if accepted else y
            tokens[b, i], logprobs[b, i] = emitted, float(lp[emitted])
            if not accepted:
                break
            num_accepted[b] += 1
    return tokens, num_accepted, status, logprobs


def kv_append_(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    """Specification of `specdec_kernels::kv_append_`."""
    _checks.kv_append_(caches, entries, positions)
    for cache, new in zip(caches, entries, strict=True):
        for b in range(cache.shape[0]):
            for j in range(new.shape[2]):
                slot = int(positions[b]) + j
                if 0 <= slot < cache.shape[2]:
                    cache[b, :, slot] = new[b, :, j]


def kv_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, zero_fill: bool
) -> None:
    """Specification of `specdec_kernels::kv_truncate_`."""
    _checks.kv_truncate_(caches, lengths, new_lengths)
    for b in range(lengths.shape[0]):
        old = int(lengths[b])
        new = max(0, min(old, int(new_lengths[b])))
        lengths[b] = new
        for cache in caches if zero_fill else ():
            cache[b, :, new : max(old, 0)] = 0
