"""The residual max(c * P - l * Q, 0) of one row: tile masses in scratch, then one tile read again.

A target row is the tuple p = (row, v, direct, threshold, c, r, inv_t): with `direct` its entries
are the law, without normalisation, else `density` makes it of their logits. The share c is 1 but
for rule block, the lenience l is 1 but for rule lenient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.chain.rules import (
    BLOCK_RULE,
    DRAFT_NOT_FINITE,
    EMPTY_RESIDUAL,
    LENIENT,
    SYNTHETIC,
    TARGET_NOT_FINITE,
    TYPICAL,
)
from specdec_kernels.triton.row.distribution import MASS, density, draw, row_law
from specdec_kernels.triton.row.draft import (
    KEEP,
    RAW,
    SAMPLED,
    SUBTRACT,
    draft_beyond,
    draft_tile,
    linear_sum,
)
from specdec_kernels.triton.row.philox import SHARED
from specdec_kernels.triton.row.tile import (
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
    row_top,
    row_total,
)


@triton.jit
def target_tile(p, tile, PROBS: tl.constexpr, TILE: tl.constexpr):
    """(P of one tile, float32 [TILE]; its top, +inf where the row holds what it may not)."""
    row, v, direct, threshold, c, r, inv_t = p
    if PROBS:
        raw = load_tile(row, tile, v, 0.0, TILE)
        top = tl.max(tl.where((raw >= 0) & (raw < INF), raw, INF), 0)
    else:
        raw = load_tile(row, tile, v, float("-inf"), TILE)
        top = tl.full([], 0.0, tl.float32)
    law = density(as_logits(raw, PROBS), threshold, c, r, inv_t)
    if PROBS:
        law = tl.where(direct, raw, law)
    return law, top


@triton.jit
def tile_residual(
    p, q, keys, tile, mode, share, lenience, RULE: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(share * P - lenience * Q, float32 [TILE]; the tops of both rows)."""
    law, p_top = target_tile(p, tile, PROBS, TILE)
    taken, q_top = draft_tile(q, keys, tile, p[1], mode, DRAFT, TILE, WIDTH)
    if RULE == BLOCK_RULE:
        law = law * share
    if RULE == LENIENT:
        taken = taken * lenience
    return law - taken, p_top, q_top


@triton.jit
def positive(x):
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def fill_residual(
    p, q, keys, tiles, mode, share, lenience, scales, sums,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Masses of all tiles into a slot -> (top of the target, top of the draft, S+, S-).

    S+ and S-, of rule block alone, are the sums of both signs of the difference.
    """
    p_top = tl.full([], float("-inf"), tl.float32)
    q_top = tl.full([], float("-inf"), tl.float32)
    more = tl.full([], 0.0, tl.float64)
    less = tl.full([], 0.0, tl.float64)
    tl.debug_barrier()
    for t in tl.range(0, tiles, num_stages=STAGES):
        difference, p_tile, q_tile = tile_residual(
            p, q, keys, t, mode, share, lenience, RULE, PROBS, DRAFT, TILE, WIDTH
        )
        p_top = tl.maximum(p_top, p_tile)
        q_top = tl.maximum(q_top, q_tile)
        scale, units = linear_units(positive(difference))
        mass = tl.sum(units, 0)
        tl.store(scales + t, scale)
        tl.store(sums + t, mass)
        if RULE == BLOCK_RULE:
            more += mass.to(tl.float64) * (1.0 / (1 << 48)) * scale.to(tl.float64)
            less += linear_sum(positive(-difference))
    tl.debug_barrier()
    if BEYOND:  # noqa: SIM102  (compiled in only where the draft has columns of its own)
        if mode == SUBTRACT:
            mass, top = draft_beyond(q, keys, p[1], DRAFT, TILE)
            q_top = tl.maximum(q_top, top)
            less += mass
    return p_top, q_top, more, less


@triton.jit
def unsound(mode, q_top, DRAFT: tl.constexpr):
    """Whether a scanned draft row holds what it may not; logits alone were judged before."""
    if DRAFT == RAW or DRAFT == SAMPLED:  # noqa: SIM109, PLR1714  (no `in` in Triton)
        bad = (mode == SUBTRACT) & ((q_top == INF) | (q_top == -INF))
    else:
        bad = tl.full([], 0, tl.int1)
    return bad


@triton.jit
def draw_residual(
    p, q, keys, tiles, mode, share, lenience, scales, sums, scale, u,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Inverse CDF of a filled slot at u; `scale` is the largest of its scales."""
    inv_t = p[6]
    total = row_total(scales, sums, tiles, scale, inv_t, True, LOG_TILES, BLOCK)
    tile, rest = choose_tile(
        scales, sums, tiles, scale, inv_t, u * total.to(tl.float64), True, LOG_TILES, BLOCK
    )
    difference, _, _ = tile_residual(
        p, q, keys, tile, mode, share, lenience, RULE, PROBS, DRAFT, TILE, WIDTH
    )
    _, units = linear_units(positive(difference))
    return tile * TILE + choose_in_tile(units, rest, TILE)


@triton.jit
def following(
    p, q, keys, mode, share, lenience, filled, law, shaping, tiles, law_tops, law_sums, tops, sums,
    u,
    RULE: tl.constexpr, PRE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(token, its log-probability, status): what follows the drafts that stand.

    It is drawn from the residual, or from P where nothing is to be taken off. `filled` says that
    the slot at `tops`, `sums` holds the residual of two sound rows. The slot of P holds the row's
    masses, but in rule block, where it is filled here.
    """
    row, v, direct, _, _, _, inv_t = p
    temp, k, top_p, min_p, filtered = shaping[0], shaping[2], shaping[3], shaping[4], shaping[5]
    top, threshold, logsumexp = law
    token = tl.full([], -1, tl.int64)
    logprob = tl.full([], 0.0, tl.float64)
    flags = tl.full([], 0, tl.int32)
    alive = tl.full([], 1, tl.int32)
    scale = tl.full([], 0.0, tl.float32)
    p_top = tl.full([], 1.0, tl.float32)
    q_top = tl.full([], 1.0, tl.float32)
    linear = tl.full([], 0, tl.int32)
    # Other rules draw from P alone, and dead code is more than some versions of Triton can analyse.
    if RULE != TYPICAL and RULE != SYNTHETIC:  # noqa: PLR1714  (no `in` in Triton)
        linear = (direct | (mode != KEEP)).to(tl.int32)
        work = linear
        while work > 0:
            work = tl.full([], 0, tl.int32)
            if filled == 0:
                p_top, q_top, _more, _less = fill_residual(
                    p, q, keys, tiles, mode, share, lenience, tops, sums, RULE, PROBS, DRAFT,
                    BEYOND, TILE, WIDTH,
                )  # fmt: skip
            filled = tl.full([], 0, tl.int32)
            if direct & ((p_top == 0) | (p_top == INF)):
                alive = tl.full([], 0, tl.int32)
            else:
                scale = row_top(tops, tiles, BLOCK)
                total = row_total(tops, sums, tiles, scale, inv_t, True, LOG_TILES, BLOCK)
                bad = unsound(mode, q_top, DRAFT)
                if (mode != KEEP) & (bad | (total == 0)):
                    # Nothing to take off: sample from the target.
                    flags |= tl.where(bad, DRAFT_NOT_FINITE, EMPTY_RESIDUAL).to(tl.int32)
                    mode = flag(KEEP)
                    share = tl.full([], 1.0, tl.float32)
                    linear = direct.to(tl.int32)
                    work = linear
        if (alive > 0) & (linear > 0):
            token = draw_residual(
                p, q, keys, tiles, mode, share, lenience, tops, sums, scale, u, RULE, PROBS, DRAFT,
                TILE, BLOCK, LOG_TILES, WIDTH,
            ).to(tl.int64)  # fmt: skip
    if (alive > 0) & (linear == 0):
        if RULE == BLOCK_RULE:
            top, threshold, logsumexp = row_law(
                row, v, tiles, law_tops, law_sums, temp, inv_t, k, top_p, min_p, filtered, token,
                token, SHARED, MASS, PRE, FILTERS, PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
            )  # fmt: skip
            alive = finite(top).to(tl.int32)
        if alive > 0:
            token = draw(
                row, v, tiles, law_tops, law_sums, top, threshold, inv_t, u, PROBS, TILE, BLOCK,
                LOG_TILES,
            ).to(tl.int64)  # fmt: skip
    if alive > 0:
        logprob = log_probability(row, token, token >= 0, direct, temp, logsumexp, threshold, PROBS)
    else:
        flags = flag(TARGET_NOT_FINITE)
    return token, logprob, flags
