"""The rules that judge drafts from the first one on."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.chain.residual import following
from specdec_kernels.triton.chain.rules import (
    BLOCK_RULE,
    DRAFT_NOT_FINITE,
    LENIENT,
    SYNTHETIC,
    TARGET_NOT_FINITE,
    TYPICAL,
)
from specdec_kernels.triton.row.distribution import (
    MASS,
    RACE,
    density_constants,
    entropy,
    race,
    row_law,
)
from specdec_kernels.triton.row.draft import KEEP, POINT, SAMPLED, draft_entry, draft_row
from specdec_kernels.triton.row.philox import ACCEPT, RESIDUAL, SHARED, uniform
from specdec_kernels.triton.row.tile import (
    INF,
    finite,
    flag,
    inverse,
    log64,
    log_probability,
    row_argmax,
)


@triton.jit
def number(noise, i, column, STREAM: tl.constexpr):
    """A uniform of row i, or the given one of `column`."""
    seed, position, uniforms = noise
    if uniforms is None:  # noqa: SIM108  (a choice of the compiler)
        u = uniform(seed, position + i, STREAM)
    else:
        u = tl.load(uniforms + column)
    return u


@triton.jit
def ratio(p_x, q_x, logprob, log_q_x, direct, PROBS: tl.constexpr, DRAFT: tl.constexpr):
    """P(x) / Q(x), float64; 0 where P(x) is 0, whatever Q(x)."""
    out = tl.where(logprob > -INF, tl.exp(logprob - log_q_x), 0.0)
    if PROBS and DRAFT != SAMPLED:
        # Both are given numbers: compare them as they are.
        quotient = tl.where(q_x > 0, p_x / tl.where(q_x > 0, q_x, 1.0), INF)
        out = tl.where(direct, tl.where(p_x > 0, quotient, 0.0), out)
    return out


@triton.jit
def target_row(p_row, x, v, tiles, tops, sums, shaping, noise, i, WHAT: tl.constexpr,
               PRE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, TILE: tl.constexpr,
               CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr):  # fmt: skip
    """(P(x) of probabilities used as they are, top, threshold, logsumexp, whether it is sound).

    Of probabilities used as they are only the drafted token is visited here.
    """
    temp, inv_t, k, top_p, min_p, filtered, direct = shaping
    seed, position, _ = noise
    p_x = tl.full([], 0.0, tl.float64)
    top = tl.full([], float("-inf"), tl.float32)
    threshold = tl.full([], float("-inf"), tl.float32)
    logsumexp = tl.full([], 0.0, tl.float64)
    if direct:
        p_x = tl.load(p_row + x, mask=(x >= 0) & (x < v), other=0).to(tl.float64)
        sound = (p_x >= 0) & (p_x < INF)
    else:
        top, threshold, logsumexp = row_law(
            p_row, v, tiles, tops, sums, temp, inv_t, k, top_p, min_p, filtered, seed,
            position + i, SHARED, WHAT, PRE, FILTERS, PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
        )  # fmt: skip
        sound = finite(top)
    return p_x, top, threshold, logsumexp, sound.to(tl.int32)


@triton.jit
def laws(
    p_row, v, direct, threshold, logsumexp, temp, inv_t, drafts, i, x, q_threshold, q_logsumexp,
    DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr,
):  # fmt: skip
    """(p, q): a target row and its draft row as the residual takes them."""
    _, _, _, _, d, _, _, q_temp, _, _, _, _ = drafts
    c, r = density_constants(logsumexp, temp)
    p = (p_row, v, direct, threshold, c, r, inv_t)
    if DRAFT == POINT:
        q = (p_row, i, d, x, threshold, c, r, inv_t)
    else:
        q_row, first, _there = draft_row(drafts, i, RAGGED_DRAFT)
        q_c, q_r = density_constants(q_logsumexp, q_temp)
        q = (q_row, first, d, x, q_threshold, q_c, q_r, inverse(q_temp))
    return p, q


@triton.jit
def near_the_top(row, x, y, v, lenience, PROBS: tl.constexpr):
    """Rule lenient at temperature 0: P(x) >= lenience * max P, P at temperature 1; y is the top."""
    known = (x >= 0) & (x < v)
    high = tl.load(row + y).to(tl.float64)
    if PROBS:
        near = tl.load(row + x, mask=known, other=0).to(tl.float64) >= lenience * high
    else:
        low = tl.load(row + x, mask=known, other=float("-inf")).to(tl.float64)
        near = low - high >= tl.log(lenience)
    return known & near


@triton.jit
def by_rate(noise, i, rates):
    """Rule synthetic -> (whether draft i stands, how likely that was)."""
    rate = tl.load(rates + i).to(tl.float64)
    hit = number(noise, i, i, ACCEPT) < rate
    return hit, tl.where(rate < 0, 0.0, tl.where(rate > 1, 1.0, rate))


@triton.jit
def by_ratio(
    u, p_x, q_x, logprob, log_q_x, direct, lenience, RULE: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr,
):  # fmt: skip
    """Rules token and lenient -> (whether u * l * Q(x) < P(x), how likely that was)."""
    if RULE == LENIENT:
        q_x = lenience * q_x
        log_q_x += tl.log(lenience)
    hit = log64(u) < logprob - log_q_x
    if PROBS and DRAFT != SAMPLED:
        hit = tl.where(direct, u * q_x < p_x, hit)
    return hit, tl.minimum(1.0, ratio(p_x, q_x, logprob, log_q_x, direct, PROBS, DRAFT))


@triton.jit
def likely_enough(
    logprob, epsilon, delta, row, v, tiles, tops, sums, top, threshold, inv_t,
    PROBS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Rule typical: P(x) > min(epsilon, delta * exp(-H)); H is a pass over the row."""
    likely = tl.exp(logprob)
    bound = epsilon
    if (likely > 0) & (likely <= epsilon):
        h = entropy(row, v, tiles, tops, sums, top, threshold, inv_t, PROBS, TILE, BLOCK, LOG_TILES)
        bound = tl.minimum(epsilon, delta * tl.exp(-h))
    return likely > bound


@triton.jit
def walk(
    rows, draft_token_ids, count, cut, missing, drafts, shaping, noise, scratch, judge, out, gamma, v,
    tiles, d_tiles,
    RULE: tl.constexpr, WHAT: tl.constexpr, PRE: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows up to the first rejection -> (how many drafts stand, rows written, status)."""
    row_0, row_stride = rows
    temp, inv_t, _, _, _, _, direct = shaping
    tops, sums, slot_0, draft_slots, slot_size, residual_at = scratch
    lenience, epsilon, delta, rates = judge
    tokens, logprobs, accept_probs = out
    flags = tl.full([], 0, tl.int32)
    stood = tl.full([], 0, tl.int32)
    i = tl.full([], 0, tl.int64)
    going = ((count > 0) | (cut == 0)).to(tl.int32)
    while going > 0:
        x = tl.load(draft_token_ids + i, mask=i < count, other=-1).to(tl.int64)
        row = row_0 + i * row_stride
        slot = (slot_0 + i) if PRE else slot_0
        law_at = slot * slot_size
        p_x, top, threshold, logsumexp, alive = target_row(
            row, x, v, tiles, tops + law_at, sums + law_at, shaping, noise, i, WHAT, PRE, FILTERS,
            PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
        )  # fmt: skip
        flags |= tl.where(alive > 0, 0, TARGET_NOT_FINITE).to(tl.int32)
        flags |= tl.where(i < count, 0, missing)

        token = tl.full([], -1, tl.int64)
        logprob = tl.full([], 0.0, tl.float64)
        chance = tl.full([], float("nan"), tl.float64)
        accepted = tl.full([], 0, tl.int32)
        if (alive > 0) & (temp == 0):
            token = row_argmax(row, v, tops + law_at, tiles, top, PROBS, TILE, BLOCK).to(tl.int64)
            hit = token == x
            if RULE == LENIENT:
                hit = hit | near_the_top(row, x, token, v, lenience, PROBS)
                token = tl.where(hit, x, token)
            accepted = hit.to(tl.int32)
            chance = tl.where(x >= 0, accepted.to(tl.float64), chance)
            if RULE == SYNTHETIC:  # noqa: SIM102  (compiled in for this rule only)
                if x >= 0:
                    hit, chance = by_rate(noise, i, rates)
                    accepted = hit.to(tl.int32)
                    token = tl.where(hit, x, token)
        elif alive > 0:
            if WHAT == RACE:
                token = race(tops + law_at, sums + law_at, tiles, inv_t, TILE, BLOCK).to(tl.int64)
                accepted = (token == x).to(tl.int32)
                chance = tl.where(x >= 0, accepted.to(tl.float64), chance)
                logprob = log_probability(
                    row, token, token >= 0, direct, temp, logsumexp, threshold, PROBS
                )
            elif WHAT == MASS and RULE != BLOCK_RULE:  # that one comes here at temperature 0 only
                logprob = log_probability(
                    row, x, (x >= 0) & (x < v), direct, temp, logsumexp, threshold, PROBS
                )
                mode = flag(KEEP)
                q_threshold = threshold
                q_logsumexp = logsumexp
                faults = tl.full([], 0, tl.int32)
                if RULE == SYNTHETIC:
                    if x >= 0:
                        hit, chance = by_rate(noise, i, rates)
                        accepted = hit.to(tl.int32)
                elif RULE == TYPICAL:
                    if x >= 0:
                        hit = likely_enough(
                            logprob, epsilon, delta, row, v, tiles, tops + law_at, sums + law_at,
                            top, threshold, inv_t, PROBS, TILE, BLOCK, LOG_TILES,
                        )  # fmt: skip
                        accepted = hit.to(tl.int32)
                        chance = accepted.to(tl.float64)
                else:
                    to = (draft_slots + slot) * slot_size
                    q_x, log_q_x, q_logsumexp, q_threshold, mode = draft_entry(
                        drafts, i, x, temp, inv_t, tops + to, sums + to, d_tiles, DRAFT,
                        RAGGED_DRAFT, PRE, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
                    )  # fmt: skip
                    if mode != KEEP:
                        hit, chance = by_ratio(
                            number(noise, i, i, ACCEPT), p_x, q_x, logprob, log_q_x, direct,
                            lenience, RULE, PROBS, DRAFT,
                        )  # fmt: skip
                        accepted = hit.to(tl.int32)
                    elif x >= 0:
                        faults = flag(DRAFT_NOT_FINITE)
                token = x
                if accepted == 0:
                    p, q = laws(
                        row, v, direct, threshold, logsumexp, temp, inv_t, drafts, i, x,
                        q_threshold, q_logsumexp, DRAFT, RAGGED_DRAFT,
                    )  # fmt: skip
                    token, logprob, more = following(
                        p, q, drafts[3], mode, tl.full([], 1.0, tl.float32),
                        lenience.to(tl.float32), tl.full([], 0, tl.int32),
                        (top, threshold, logsumexp), shaping, tiles,
                        tops + law_at, sums + law_at, tops + residual_at, sums + residual_at,
                        number(noise, i, gamma, RESIDUAL), RULE, PRE, FILTERS, PROBS, DRAFT,
                        BEYOND, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
                    )  # fmt: skip
                    flags |= more | tl.where(token >= 0, faults, 0)
        tl.store(tokens + i, token.to(tokens.dtype.element_ty))
        if logprobs is not None:
            tl.store(logprobs + i, logprob.to(tl.float32))
        if accept_probs is not None:
            tl.store(accept_probs + i, chance.to(tl.float32), mask=i < gamma)
        stood += accepted
        i += 1
        going = accepted * ((i < count) | (cut == 0)).to(tl.int32)
    return stood, i.to(tl.int32), flags
