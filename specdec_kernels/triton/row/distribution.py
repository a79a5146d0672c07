"""Sampling parameters of a sequence, statistics of a row under them, and the draws from it.

Statistics of a row's tiles are in scratch memory (`TileStats`). Either the program that needs the
row fills them, or, for small batches, a grid over (row, tile) has filled them before
(ROW_PARALLEL). Both call `store_tile`, so the schedule cannot change a result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .filter import row_threshold, tile_maximum
from .noise import tile_exponentials
from .tile import (
    FLT_MAX,
    INF,
    STAGES,
    choose_in_tile,
    choose_tile,
    count_parameter,
    exp_units,
    exp_weights,
    finite,
    inverse,
    load_logits,
    parameter,
    row_maximum,
    row_total,
)

# Which statistics a tile needs (STATS).
MAXIMA = tl.constexpr(0)
MASSES = tl.constexpr(1)  # maxima and masses
GUMBEL = tl.constexpr(2)  # maxima, masses and the best of log w + Gumbel noise


class Sampling(NamedTuple):
    """The sampling arguments of a kernel: tensors [B], which may be None, each with its scalar."""

    temperatures: Any
    temperature: Any
    top_ks: Any
    top_k: Any
    top_ps: Any
    top_p: Any
    min_ps: Any
    min_p: Any


class SequenceParams(NamedTuple):
    """The sampling parameters of one sequence."""

    temperature: Any  # float64
    inv_t: Any  # float32
    top_k: Any
    top_p: Any
    min_p: Any
    filtered: Any  # whether a filter changes the distribution
    direct: Any  # whether rows hold probabilities that are used as they are


class RowStats(NamedTuple):
    """Statistics of a row. Its maximum is not finite where the row is not valid."""

    maximum: Any  # float32
    threshold: Any  # float32, the smallest surviving logit
    logsumexp: Any  # float64, over survivors after the temperature


class WeightParams(NamedTuple):
    """The parameters of P(v) = exp((logits[v] - offset) * inv_t - remainder)."""

    threshold: Any
    offset: Any
    remainder: Any
    inv_t: Any


@triton.jit
def sequence_params(sampling, b, v, GREEDY: tl.constexpr, DIRECT: tl.constexpr):
    """(SequenceParams, whether all are in range) of sequence b.

    With DIRECT the rows hold probabilities, and where no parameter changes them they are not
    normalised again.
    """
    temperature = parameter(sampling.temperatures, sampling.temperature, b)
    k = count_parameter(sampling.top_ks, sampling.top_k, b)
    p = parameter(sampling.top_ps, sampling.top_p, b)
    min_p = parameter(sampling.min_ps, sampling.min_p, b)
    # Comparisons with NaN are false, so NaN is out of range everywhere.
    good = (temperature >= 0) & (temperature < INF) & (k >= 0)
    good = good & (p > 0) & (p <= 1) & (min_p >= 0) & (min_p <= 1)
    filtered = ((k > 0) & (k < v)) | (p < 1) | (min_p > 0)
    if GREEDY:
        temperature = tl.full([], 0.0, tl.float64)
    direct = (temperature == 1) & (filtered == 0) & DIRECT
    filtered = filtered & (temperature > 0)
    inv_t = inverse(temperature)
    return SequenceParams(temperature, inv_t, k, p, min_p, filtered, direct), good


@triton.jit
def store_tile(
    row, tile, v, inv_t, threshold, stats, seed, position, STREAM: tl.constexpr,
    STATS: tl.constexpr, PROBS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one tile and store them."""
    logits = load_logits(row, tile, v, PROBS, TILE)
    maximum = tl.max(logits, 0)
    tl.store(stats.maxima + tile, maximum)
    if STATS != MAXIMA:
        weights = exp_weights(logits, maximum, threshold, inv_t)
        tl.store(stats.sums + tile, tl.sum(exp_units(weights), 0))
    if STATS == GUMBEL:
        noise = tile_exponentials(tile, seed, position, STREAM, TILE)
        base = tl.where(maximum == -INF, 0.0, maximum)
        keep = (logits >= threshold) & (logits < INF)
        # Gumbel noise is -log of an exponential.
        score = tl.where(keep, (logits - base) * inv_t - tl.log(noise), -INF)
        best = tl.max(score, 0)
        index = tl.arange(0, TILE)
        tl.store(stats.maxima + stats.tiles + tile, best)
        first = tl.min(tl.where(score == best, index, TILE - 1), 0)
        tl.store(stats.sums + stats.tiles + tile, first.to(tl.int64))


@triton.jit
def row_stats(
    row, v, stats, params, seed, position, STREAM: tl.constexpr, STATS: tl.constexpr,
    ROW_PARALLEL: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Fill the tile statistics where needed -> RowStats.

    Where the row is not valid, the threshold and the logsumexp mean nothing.
    """
    threshold = tl.full([], float("-inf"), tl.float32)
    maximum = tl.full([], float("-inf"), tl.float32)
    logsumexp = tl.full([], 0.0, tl.float64)
    work = tl.full([], 0 if ROW_PARALLEL else 1, tl.int32)
    if FILTERS:  # noqa: SIM102  (compiled in only where some sequence may have a filter)
        if params.filtered:
            if not ROW_PARALLEL:
                tl.debug_barrier()
                for t in tl.range(0, stats.tiles, num_stages=STAGES):
                    tl.store(stats.maxima + t, tile_maximum(row, t, v, PROBS, TILE))
                tl.debug_barrier()
            maximum = row_maximum(stats, BLOCK)
            if finite(maximum):
                threshold = row_threshold(row, v, maximum, params, PROBS, LOG_TILES, CHUNK)
            work = tl.full([], 1, tl.int32)
    if work > 0:
        # The threads of a program share the scratch: the first barrier waits for those that still
        # read the row before, the second for those that write this one.
        tl.debug_barrier()
        for t in tl.range(0, stats.tiles, num_stages=STAGES):
            store_tile(
                row, t, v, params.inv_t, threshold, stats, seed, position, STREAM, STATS, PROBS,
                TILE,
            )  # fmt: skip
        tl.debug_barrier()
    maximum = row_maximum(stats, BLOCK)
    if STATS != MAXIMA and finite(maximum):
        total = row_total(stats, maximum, params.inv_t, False, LOG_TILES, BLOCK)
        mass = total.to(tl.float64) * (2.0 ** (LOG_TILES - 50))
        logsumexp = maximum.to(tl.float64) / tl.maximum(params.temperature, 1e-300) + tl.log(mass)
    return RowStats(maximum, threshold, logsumexp)


@triton.jit
def draw_token(
    row, v, stats, maximum, threshold, inv_t, u, PROBS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """The inverse CDF at u of a row whose tile statistics are filled."""
    total = row_total(stats, maximum, inv_t, False, LOG_TILES, BLOCK)
    tile, rest = choose_tile(
        stats, maximum, inv_t, u * total.to(tl.float64), False, LOG_TILES, BLOCK
    )
    logits = load_logits(row, tile, v, PROBS, TILE)
    units = exp_units(exp_weights(logits, tl.max(logits, 0), threshold, inv_t))
    return tile * TILE + choose_in_tile(units, rest, TILE)


@triton.jit
def gumbel_argmax(stats, inv_t, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The token of the best Gumbel score; scores are compared across tiles in float64."""
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], 0, tl.int32)
    for t in range(0, stats.tiles, BLOCK):
        index = t + tl.arange(0, BLOCK)
        inside = index < stats.tiles
        own = tl.load(stats.maxima + index, mask=inside, other=float("-inf")).to(tl.float64)
        score = tl.load(
            stats.maxima + stats.tiles + index, mask=inside, other=float("-inf")
        ).to(tl.float64)  # fmt: skip
        base = tl.where(own > -INF, own * inv_t.to(tl.float64), 0.0)
        score = score + base
        high = tl.max(score, 0)
        first = tl.min(tl.where(score == high, index, 0x7FFFFFFF), 0)
        if high > best:
            place = tl.load(stats.sums + stats.tiles + first)
            winner = (first * TILE).to(tl.int32) + place.to(tl.int32)
            best = high
    return winner


@triton.jit
def entropy(
    row, v, stats, maximum, threshold, inv_t, PROBS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """H(P) in float64 of a row whose tile statistics are filled.

    With weights w relative to the largest, H = log(sum w) + sum(w * -log w) / sum w.
    """
    total = row_total(stats, maximum, inv_t, False, LOG_TILES, BLOCK).to(tl.float64)
    spread = tl.full([], 0, tl.int64)
    unit = tl.full([], 2.0 ** (50 - LOG_TILES), tl.float32)
    for t in tl.range(0, stats.tiles, num_stages=STAGES):
        logits = load_logits(row, t, v, PROBS, TILE)
        weights = exp_weights(logits, maximum, threshold, inv_t)
        part = tl.where(weights > 0, weights * ((maximum - logits) * inv_t), 0.0)
        spread += tl.sum((part * unit).to(tl.int64), 0)
    return tl.log(total * (2.0 ** (LOG_TILES - 50))) + spread.to(tl.float64) / total


@triton.jit
def entry(row, x, v, PROBS: tl.constexpr, TILE: tl.constexpr):
    """The logit of one token, to the bit as scans of the row see it."""
    logits = load_logits(row, x // TILE, v, PROBS, TILE)
    return tl.max(tl.where(tl.arange(0, TILE) == x % TILE, logits, float("-inf")), 0)


@triton.jit
def count_larger(row, v, stats, value, PROBS: tl.constexpr, TILE: tl.constexpr):
    """How many logits of the row are larger than a value."""
    count = tl.full([], 0, tl.int64)
    for t in tl.range(0, stats.tiles, num_stages=STAGES):
        logits = load_logits(row, t, v, PROBS, TILE)
        count += tl.sum((logits > value).to(tl.int32), 0)
    return count


@triton.jit
def weight_params(threshold, logsumexp, temperature, inv_t):
    """WeightParams of a row; the offset has the size of the logits, so l - offset is accurate."""
    offset = logsumexp * temperature
    offset = tl.minimum(tl.maximum(offset, -3.4028234663852886e38), FLT_MAX).to(tl.float32)
    remainder = logsumexp - offset.to(tl.float64) / tl.maximum(temperature, 1e-300)
    return WeightParams(threshold, offset, remainder.to(tl.float32), inv_t)


@triton.jit
def probabilities(logits, weights):
    """P of a tile, float32. P and Q use one expression, so that equal ones cancel exactly."""
    keep = (logits >= weights.threshold) & (logits < INF)
    scale = tl.zeros(logits.shape, tl.float32) + weights.inv_t
    remainder = tl.zeros_like(logits) - weights.remainder
    return tl.where(keep, tl.exp(tl.fma(logits - weights.offset, scale, remainder)), 0.0)
