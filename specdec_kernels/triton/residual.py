"""The residual max(P - Q, 0) of one row: tile masses in scratch, then one tile read again."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.law import density
from specdec_kernels.triton.row import (
    INF,
    STAGES,
    as_logits,
    choose_in_tile,
    choose_tile,
    linear_units,
    load_tile,
    row_total,
)

# What a draft is.
POINT = tl.constexpr(0)  # a point mass at the drafted token
LAW = tl.constexpr(1)  # logits, at the target's temperature
RAW = tl.constexpr(2)  # probabilities, used as they are
SAMPLED = tl.constexpr(3)  # logits with the logsumexp and threshold that `sample` left

# What to take off P at one row: nothing, the drafted token, a draft row.
KEEP = tl.constexpr(0)
REMOVE = tl.constexpr(1)
SUBTRACT = tl.constexpr(2)


@triton.jit
def tile_residual(
    row, tile, v, direct, threshold, c, r, inv_t,
    draft, x, mode, q_threshold, q_c, q_r, q_inv_t,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(weights [TILE] float32, top of the target, top of the draft).

    A top is +inf where its row holds what it may not. With `direct` the target's probabilities are
    the law, without normalisation.
    """
    if PROBS:
        raw = load_tile(row, tile, v, 0.0, TILE)
        p_top = tl.max(tl.where((raw >= 0) & (raw < INF), raw, INF), 0)
    else:
        raw = load_tile(row, tile, v, float("-inf"), TILE)
        p_top = tl.full([], 0.0, tl.float32)
    weights = density(as_logits(raw, PROBS), threshold, c, r, inv_t)
    if PROBS:
        weights = tl.where(direct, raw, weights)
    q_top = tl.full([], 0.0, tl.float32)
    index = tl.arange(0, TILE)
    start = tile * TILE
    if DRAFT != POINT:
        other: tl.constexpr = 0.0 if DRAFT == RAW else float("-inf")
        end = tl.where(mode == SUBTRACT, v - start, 0)
        d = tl.load(draft + start + index, mask=index < end, other=other).to(tl.float32)
        if DRAFT == RAW:
            q_top = tl.max(tl.where((d >= 0) & (d < INF), d, INF), 0)
            weights = weights - d
        else:
            d = as_logits(d, False)
            q_top = tl.max(d, 0)
            weights = weights - density(d, q_threshold, q_c, q_r, q_inv_t)
    gone = tl.where(mode == REMOVE, x - start, -1)
    weights = tl.where((index == gone) | (weights <= 0), 0.0, weights)
    return weights, p_top, q_top


@triton.jit
def fill_residual(
    row, v, tiles, direct, threshold, c, r, inv_t,
    draft, x, mode, q_threshold, q_c, q_r, q_inv_t,
    scales, sums,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Masses of all tiles into a slot -> (top of the target, top of the draft)."""
    p_top = tl.full([], float("-inf"), tl.float32)
    q_top = tl.full([], float("-inf"), tl.float32)
    tl.debug_barrier()
    for t in tl.range(0, tiles, num_stages=STAGES):
        weights, p_tile, q_tile = tile_residual(
            row, t, v, direct, threshold, c, r, inv_t,
            draft, x, mode, q_threshold, q_c, q_r, q_inv_t, PROBS, DRAFT, TILE,
        )  # fmt: skip
        p_top = tl.maximum(p_top, p_tile)
        q_top = tl.maximum(q_top, q_tile)
        scale, units = linear_units(weights)
        tl.store(scales + t, scale)
        tl.store(sums + t, tl.sum(units, 0))
    tl.debug_barrier()
    return p_top, q_top


@triton.jit
def draw_residual(
    row, v, tiles, direct, threshold, c, r, inv_t,
    draft, x, mode, q_threshold, q_c, q_r, q_inv_t,
    scales, sums, scale, u,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Inverse CDF of a filled slot at u; `scale` is the largest of its scales."""
    total = row_total(scales, sums, tiles, scale, inv_t, True, LOG_TILES, BLOCK)
    tile, rest = choose_tile(
        scales, sums, tiles, scale, inv_t, u * total.to(tl.float64), True, LOG_TILES, BLOCK
    )
    weights, _, _ = tile_residual(
        row, tile, v, direct, threshold, c, r, inv_t,
        draft, x, mode, q_threshold, q_c, q_r, q_inv_t, PROBS, DRAFT, TILE,
    )  # fmt: skip
    _, units = linear_units(weights)
    return tile * TILE + choose_in_tile(units, rest, TILE)
