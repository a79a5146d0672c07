"""The residual max(p_scale * P - lenience * Q, 0) of one row, and the recovered or bonus token.

Its tile masses go to scratch, and the tile that the drawn token falls into is computed again.
`p_scale` is 1 except in rule block, and `lenience` is 1 except in rule lenient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..row.distribution import MASSES, draw_token, probabilities, row_stats
from ..row.draft import (
    DRAFT_PROBS,
    KEEP,
    SAMPLED,
    SUBTRACT,
    draft_tile,
    linear_sum,
    mass_beyond,
)
from ..row.noise import SHARED
from ..row.status import DRAFT_INVALID, EMPTY_RESIDUAL, TARGET_INVALID
from ..row.tile import (
    INF,
    STAGES,
    as_logits,
    choose_in_tile,
    choose_tile,
    finite,
    flag,
    linear_units,
    load_tile,
    log_probability,
    row_maximum,
    row_total,
)
from .rules import (
    BLOCK_RULE,
    LENIENT,
    TOKEN,
)


@triton.jit
def target_tile(p, tile, PROBS: tl.constexpr, TILE: tl.constexpr):
    """(P of one tile, float32 [TILE]; its maximum, +inf where the tile holds an invalid value)."""
    if PROBS:
        raw = load_tile(p.row, tile, p.v, 0.0, TILE)
        maximum = tl.max(tl.where((raw >= 0) & (raw < INF), raw, INF), 0)
    else:
        raw = load_tile(p.row, tile, p.v, float("-inf"), TILE)
        maximum = tl.full([], 0.0, tl.float32)
    probs = probabilities(as_logits(raw, PROBS), p.weights)
    if PROBS:
        probs = tl.where(p.direct, raw, probs)
    return probs, maximum


@triton.jit
def tile_residual(
    p, q, drafts, tile, mode, p_scale, lenience, RULE: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(p_scale * P - lenience * Q, float32 [TILE]; the maxima of both rows)."""
    probs, p_max = target_tile(p, tile, PROBS, TILE)
    q_probs, q_max = draft_tile(q, drafts, tile, p.v, mode, DRAFT, TILE, WIDTH)
    if RULE == BLOCK_RULE:
        probs = probs * p_scale
    if RULE == LENIENT:
        q_probs = q_probs * lenience
    return probs - q_probs, p_max, q_max


@triton.jit
def positive(x):
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def fill_residual(
    p, q, drafts, mode, p_scale, lenience, stats,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the residual's tile masses -> (maxima of P's and Q's rows, positive sum, negative sum).

    The sums are those of the positive and of the negative parts of p_scale * P - Q, both as
    positive numbers. Only rule block needs them.
    """
    p_max = tl.full([], float("-inf"), tl.float32)
    q_max = tl.full([], float("-inf"), tl.float32)
    positive_sum = tl.full([], 0.0, tl.float64)
    negative_sum = tl.full([], 0.0, tl.float64)
    tl.debug_barrier()
    for t in tl.range(0, stats.tiles, num_stages=STAGES):
        difference, p_tile, q_tile = tile_residual(
            p, q, drafts, t, mode, p_scale, lenience, RULE, PROBS, DRAFT, TILE, WIDTH
        )
        p_max = tl.maximum(p_max, p_tile)
        q_max = tl.maximum(q_max, q_tile)
        scale, units = linear_units(positive(difference))
        mass = tl.sum(units, 0)
        tl.store(stats.maxima + t, scale)
        tl.store(stats.sums + t, mass)
        if RULE == BLOCK_RULE:
            positive_sum += mass.to(tl.float64) * (1.0 / (1 << 48)) * scale.to(tl.float64)
            negative_sum += linear_sum(positive(-difference))
    tl.debug_barrier()
    if BEYOND:  # noqa: SIM102  (compiled in only where the draft has columns of its own)
        if mode == SUBTRACT:
            mass, maximum = mass_beyond(q, drafts, p.v, DRAFT, TILE)
            q_max = tl.maximum(q_max, maximum)
            negative_sum += mass
    return p_max, q_max, positive_sum, negative_sum


@triton.jit
def invalid_draft(mode, q_max, DRAFT: tl.constexpr):
    """Whether a draft row turned out invalid in a scan; plain logits have been checked before."""
    if DRAFT == DRAFT_PROBS or DRAFT == SAMPLED:  # noqa: SIM109, PLR1714  (no `in` in Triton)
        bad = (mode == SUBTRACT) & ((q_max == INF) | (q_max == -INF))
    else:
        bad = tl.full([], 0, tl.int1)
    return bad


@triton.jit
def draw_residual(
    p, q, drafts, mode, p_scale, lenience, stats, scale, u,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The inverse CDF at u of a residual whose tile masses are filled.

    `scale` is the largest of the tiles' scales.
    """
    inv_t = p.weights.inv_t
    total = row_total(stats, scale, inv_t, True, LOG_TILES, BLOCK)
    tile, rest = choose_tile(stats, scale, inv_t, u * total.to(tl.float64), True, LOG_TILES, BLOCK)
    difference, _, _ = tile_residual(
        p, q, drafts, tile, mode, p_scale, lenience, RULE, PROBS, DRAFT, TILE, WIDTH
    )
    _, units = linear_units(positive(difference))
    return tile * TILE + choose_in_tile(units, rest, TILE)


@triton.jit
def recovered_or_bonus(
    p, q, drafts, mode, p_scale, lenience, filled, p_stats, params, target_stats, stats, u,
    RULE: tl.constexpr, ROW_PARALLEL: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw the recovered or bonus token -> (token, its log-probability, status).

    It comes from the residual, or from P where nothing is subtracted. `filled` says that `stats`
    holds the residual's tile masses and that both rows are valid. `target_stats` holds the masses
    of P, except in rule block, where they are filled here.
    """
    maximum = p_stats.maximum
    threshold = p_stats.threshold
    logsumexp = p_stats.logsumexp
    token = tl.full([], -1, tl.int64)
    logprob = tl.full([], 0.0, tl.float64)
    flags = tl.full([], 0, tl.int32)
    valid = tl.full([], 1, tl.int32)
    scale = tl.full([], 0.0, tl.float32)
    p_max = tl.full([], 1.0, tl.float32)
    q_max = tl.full([], 1.0, tl.float32)
    linear = tl.full([], 0, tl.int32)
    # The other rules draw from P alone. The condition is for the compiler: Triton 3.6 fails to
    # analyse this much dead code.
    if RULE == TOKEN or RULE == LENIENT or RULE == BLOCK_RULE:  # noqa: PLR1714, SIM109  (no `in`)
        linear = (p.direct | (mode != KEEP)).to(tl.int32)
        work = linear
        while work > 0:
            work = tl.full([], 0, tl.int32)
            if filled == 0:
                p_max, q_max, _positive_sum, _negative_sum = fill_residual(
                    p, q, drafts, mode, p_scale, lenience, stats, RULE, PROBS, DRAFT, BEYOND, TILE,
                    WIDTH,
                )  # fmt: skip
            filled = tl.full([], 0, tl.int32)
            if p.direct & ((p_max == 0) | (p_max == INF)):
                valid = tl.full([], 0, tl.int32)
            else:
                scale = row_maximum(stats, BLOCK)
                total = row_total(stats, scale, p.weights.inv_t, True, LOG_TILES, BLOCK)
                bad = invalid_draft(mode, q_max, DRAFT)
                if (mode != KEEP) & (bad | (total == 0)):
                    # Q cannot be subtracted, so the token is drawn from P.
                    flags |= tl.where(bad, DRAFT_INVALID, EMPTY_RESIDUAL).to(tl.int32)
                    mode = flag(KEEP)
                    p_scale = tl.full([], 1.0, tl.float32)
                    linear = p.direct.to(tl.int32)
                    work = linear
        if (valid > 0) & (linear > 0):
            token = draw_residual(
                p, q, drafts, mode, p_scale, lenience, stats, scale, u, RULE, PROBS, DRAFT, TILE,
                BLOCK, LOG_TILES, WIDTH,
            ).to(tl.int64)  # fmt: skip
    if (valid > 0) & (linear == 0):
        if RULE == BLOCK_RULE:
            own = row_stats(
                p.row, p.v, target_stats, params, token, token, SHARED, MASSES, ROW_PARALLEL,
                FILTERS, PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
            )  # fmt: skip
            maximum = own.maximum
            threshold = own.threshold
            logsumexp = own.logsumexp
            valid = finite(maximum).to(tl.int32)
        if valid > 0:
            token = draw_token(
                p.row, p.v, target_stats, maximum, threshold, p.weights.inv_t, u, PROBS, TILE,
                BLOCK, LOG_TILES,
            ).to(tl.int64)  # fmt: skip
    if valid > 0:
        logprob = log_probability(
            p.row, token, token >= 0, p.direct, params.temperature, logsumexp, threshold, PROBS
        )
    else:
        flags = flag(TARGET_INVALID)
    return token, logprob, flags
