"""The law of one row: tile statistics in scratch, threshold, total, and the draws from it.

A row's scratch is a slot: `tops` float32 [PLANES, tiles] (tile maximum; best race score) and `sums`
int64 [PLANES, tiles] (tile mass; index of the best score). Either the program that needs the row
fills the slot, or, for small batches, a grid over (row, tile) has filled it before (PRE): both call
`store_tile`, so the schedule cannot change a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.row.filter import row_threshold, tile_top
from specdec_kernels.triton.row.philox import tile_exponentials
from specdec_kernels.triton.row.tile import (
    FLT_MAX,
    INF,
    STAGES,
    choose_in_tile,
    choose_tile,
    finite,
    law_units,
    law_weights,
    load_logits,
    row_top,
    row_total,
)

MASS = tl.constexpr(1)  # tile maxima and masses
RACE = tl.constexpr(2)  # and the best of log w - log E
TOPS = tl.constexpr(0)  # tile maxima only


@triton.jit
def store_tile(
    row, tile, v, inv_t, threshold, tops, sums, tiles, seed, position, STREAM: tl.constexpr,
    WHAT: tl.constexpr, PROBS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Statistics of one tile into its place in the slot."""
    logits = load_logits(row, tile, v, PROBS, TILE)
    top = tl.max(logits, 0)
    tl.store(tops + tile, top)
    if WHAT != TOPS:
        weights = law_weights(logits, top, threshold, inv_t)
        tl.store(sums + tile, tl.sum(law_units(weights), 0))
    if WHAT == RACE:
        noise = tile_exponentials(tile, seed, position, STREAM, TILE)
        base = tl.where(top == -INF, 0.0, top)
        keep = (logits >= threshold) & (logits < INF)
        score = tl.where(keep, (logits - base) * inv_t - tl.log(noise), -INF)
        best = tl.max(score, 0)
        index = tl.arange(0, TILE)
        tl.store(tops + tiles + tile, best)
        first = tl.min(tl.where(score == best, index, TILE - 1), 0)
        tl.store(sums + tiles + tile, first.to(tl.int64))


@triton.jit
def row_law(
    row, v, tiles, tops, sums, temperature, inv_t, k, p, min_p, filtered, seed, position,
    STREAM: tl.constexpr, WHAT: tl.constexpr, PRE: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Fill the slot where needed -> (top, threshold, logsumexp).

    A row whose `top` is not finite has no law; the other two are then 0.
    """
    threshold = tl.full([], float("-inf"), tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    logsumexp = tl.full([], 0.0, tl.float64)
    work = tl.full([], 0 if PRE else 1, tl.int32)
    if FILTERS:  # noqa: SIM102  (compiled in only where some sequence may have a filter)
        if filtered:
            if not PRE:
                tl.debug_barrier()
                for t in tl.range(0, tiles, num_stages=STAGES):
                    tl.store(tops + t, tile_top(row, t, v, PROBS, TILE))
                tl.debug_barrier()
            top = row_top(tops, tiles, BLOCK)
            if finite(top):
                threshold = row_threshold(
                    row, v, top, temperature, inv_t, k, p, min_p, PROBS, LOG_TILES, CHUNK
                )
            work = tl.full([], 1, tl.int32)
    if work > 0:
        # The barriers order the scratch between the thread that writes and those that read: before,
        # the last row's readers; after, this row's.
        tl.debug_barrier()
        for t in tl.range(0, tiles, num_stages=STAGES):
            store_tile(
                row, t, v, inv_t, threshold, tops, sums, tiles, seed, position, STREAM, WHAT,
                PROBS, TILE,
            )  # fmt: skip
        tl.debug_barrier()
    top = row_top(tops, tiles, BLOCK)
    if WHAT != TOPS and finite(top):
        total = row_total(tops, sums, tiles, top, inv_t, False, LOG_TILES, BLOCK)
        mass = total.to(tl.float64) * (2.0 ** (LOG_TILES - 50))
        logsumexp = top.to(tl.float64) / tl.maximum(temperature, 1e-300) + tl.log(mass)
    return top, threshold, logsumexp


@triton.jit
def draw(
    row, v, tiles, tops, sums, top, threshold, inv_t, u, PROBS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Inverse CDF of a filled slot at u."""
    total = row_total(tops, sums, tiles, top, inv_t, False, LOG_TILES, BLOCK)
    tile, rest = choose_tile(
        tops, sums, tiles, top, inv_t, u * total.to(tl.float64), False, LOG_TILES, BLOCK
    )
    logits = load_logits(row, tile, v, PROBS, TILE)
    units = law_units(law_weights(logits, tl.max(logits, 0), threshold, inv_t))
    return tile * TILE + choose_in_tile(units, rest, TILE)


@triton.jit
def race(tops, sums, tiles, inv_t, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Winner of the race in a filled slot; scores are compared across tiles in float64."""
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], 0, tl.int32)
    for t in range(0, tiles, BLOCK):
        index = t + tl.arange(0, BLOCK)
        inside = index < tiles
        own = tl.load(tops + index, mask=inside, other=float("-inf")).to(tl.float64)
        score = tl.load(tops + tiles + index, mask=inside, other=float("-inf")).to(tl.float64)
        base = tl.where(own > -INF, own * inv_t.to(tl.float64), 0.0)
        score = score + base
        high = tl.max(score, 0)
        first = tl.min(tl.where(score == high, index, 0x7FFFFFFF), 0)
        if high > best:
            place = tl.load(sums + tiles + first)
            winner = (first * TILE).to(tl.int32) + place.to(tl.int32)
            best = high
    return winner


@triton.jit
def entropy(
    row, v, tiles, tops, sums, top, threshold, inv_t, PROBS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """H(P) of a filled slot, float64: log sum w + sum w d / sum w, d = -log w above the top."""
    total = row_total(tops, sums, tiles, top, inv_t, False, LOG_TILES, BLOCK).to(tl.float64)
    spread = tl.full([], 0, tl.int64)
    unit = tl.full([], 2.0 ** (50 - LOG_TILES), tl.float32)
    for t in tl.range(0, tiles, num_stages=STAGES):
        logits = load_logits(row, t, v, PROBS, TILE)
        weights = law_weights(logits, top, threshold, inv_t)
        part = tl.where(weights > 0, weights * ((top - logits) * inv_t), 0.0)
        spread += tl.sum((part * unit).to(tl.int64), 0)
    return tl.log(total * (2.0 ** (LOG_TILES - 50))) + spread.to(tl.float64) / total


@triton.jit
def density_constants(logsumexp, temperature):
    """(c, r) with log P = (l - c) / T - r: c carries the size, so that l - c keeps its digits."""
    c = logsumexp * temperature
    c = tl.minimum(tl.maximum(c, -3.4028234663852886e38), FLT_MAX).to(tl.float32)
    r = logsumexp - c.to(tl.float64) / tl.maximum(temperature, 1e-300)
    return c, r.to(tl.float32)


@triton.jit
def density(logits, threshold, c, r, inv_t):
    """P of a tile, float32; the same expression for P and Q, so that equal laws cancel exactly."""
    keep = (logits >= threshold) & (logits < INF)
    scale = tl.zeros(logits.shape, tl.float32) + inv_t
    return tl.where(keep, tl.exp(tl.fma(logits - c, scale, tl.zeros_like(logits) - r)), 0.0)
