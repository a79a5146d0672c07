"""Exact filter thresholds of one row, without a sort and without a copy of the row.

A threshold is the largest value whose upper set weighs enough: k tokens for top-k, top_p of the
mass for top-p. Floats in their bit order are integers, so each pass over the row narrows an integer
interval eightfold, and also to the least and the greatest value seen in it; the search ends at one
value, an entry of the row. Masses are int64 (see tile.py), so the answer does not depend on the
order of summation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import INF, STAGES, exp_weights, load_logits

PIVOTS = tl.constexpr(8)
LOWEST = tl.constexpr(-2139095041)  # the key of -inf


@triton.jit
def key_of(x):
    """Order-preserving int32 of float32; the two zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def select(
    row, v, low, high, need, maximum, inv_t, MASS: tl.constexpr, PROBS: tl.constexpr,
    LOG_TILES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high] whose upper set weighs at least `need` (int64 scalars).

    With MASS a token weighs its probability and `need` is a share of the mass from `low` on;
    without, every token weighs one. The upper set of `low` must weigh at least `need`.
    """
    pivot_index = tl.arange(0, PIVOTS)
    chunks = tl.cdiv(v, CHUNK)
    enough = tl.full([], 0.0, tl.float64)
    known = tl.full([], 0, tl.int32)
    unit = tl.full([], 2.0 ** (50 - LOG_TILES), tl.float32)
    while low < high:
        step = (high - low + PIVOTS) // PIVOTS
        pivots = (low + step * pivot_index.to(tl.int64)).to(tl.int32)
        if MASS:
            weight = tl.zeros([PIVOTS, CHUNK], tl.int64)
        else:
            weight = tl.zeros([PIVOTS, CHUNK], tl.int32)
        least = tl.full([CHUNK], 0x7FFFFFFF, tl.int32)
        greatest = tl.full([CHUNK], LOWEST, tl.int32)
        for t in tl.range(0, chunks, num_stages=STAGES):
            logits = load_logits(row, t, v, PROBS, CHUNK)
            inside = tl.arange(0, CHUNK) < v - t * CHUNK
            key = key_of(logits)
            if MASS:
                one = (exp_weights(logits, maximum, -INF, inv_t) * unit).to(tl.int64)
            else:
                one = inside.to(tl.int32)
            above = key[None, :] >= pivots[:, None]
            weight += tl.where(above, one[None, :], 0)
            held = inside & (key >= low) & (key <= high)
            least = tl.minimum(least, tl.where(held, key, 0x7FFFFFFF))
            greatest = tl.maximum(greatest, tl.where(held, key, LOWEST))
        heavy = tl.sum(weight, 1).to(tl.float64)
        if known == 0:
            whole = tl.sum(tl.where(pivot_index == 0, heavy, 0.0), 0)
            enough = need * whole if MASS else need
            known += 1
        passed = tl.sum((heavy >= enough).to(tl.int64), 0)
        # Weights fall with the pivot, and the first one is known to pass.
        low_next = low + step * (tl.maximum(passed, 1) - 1)
        high_next = tl.minimum(low_next + step - 1, high)
        low = tl.maximum(low_next, tl.min(least, 0).to(tl.int64))
        high = tl.minimum(high_next, tl.max(greatest, 0).to(tl.int64))
    return low


@triton.jit
def row_threshold(
    row, v, maximum, params, PROBS: tl.constexpr, LOG_TILES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The smallest surviving logit (float32) of a valid row: top-k, top-p of the rest, min-p."""
    k = params.top_k
    low = tl.full([], LOWEST, tl.int64)
    high = key_of(maximum).to(tl.int64)
    if (k > 0) & (k < v):
        low = select(
            row, v, low, high, k.to(tl.float64), maximum, params.inv_t, False, PROBS, LOG_TILES,
            CHUNK,
        )  # fmt: skip
    if params.top_p < 1:
        low = select(
            row, v, low, high, params.top_p, maximum, params.inv_t, True, PROBS, LOG_TILES, CHUNK
        )
    threshold = value_of(low.to(tl.int32))
    if params.min_p > 0:
        # The smallest float32 not below the float64 bound selects the same tokens as the bound.
        bound = maximum.to(tl.float64) + params.temperature * tl.log(params.min_p)
        bound = tl.maximum(bound, -3.4028234663852886e38)
        nearest = bound.to(tl.float32)
        key = key_of(nearest)
        key = tl.where(nearest.to(tl.float64) < bound, key + 1, key)
        threshold = tl.maximum(threshold, value_of(key))
    return threshold


@triton.jit
def tile_maximum(row, tile, v, PROBS: tl.constexpr, TILE: tl.constexpr):
    return tl.max(load_logits(row, tile, v, PROBS, TILE), 0)
