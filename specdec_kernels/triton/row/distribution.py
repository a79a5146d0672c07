"""Sampling parameters of a sequence, statistics of a row's tiles, and the draws from them.

A row of which a filter leaves few tokens is listed: its candidates are in scratch memory, in order
of their ids, and count as the row's only tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile import (
    FLT_MAX,
    INF,
    as_logits,
    choose_in_tile,
    choose_tile,
    exp_units,
    exp_weights,
    inverse,
    load_entries,
    log64,
    parameter,
    row_total,
)

# Which statistics a tile needs (STATS).
MAXIMA = tl.constexpr(0)
MASSES = tl.constexpr(1)  # maxima and masses
GUMBEL = tl.constexpr(2)  # maxima, masses and the best of log w + Gumbel noise
ABSENT = tl.constexpr(0x7FFFFFFF)  # the id of no token


class SequenceParams(NamedTuple):
    """The sampling parameters of one sequence."""

    temperature: Any  # float64
    inv_t: Any  # float32
    top_k: Any  # 0 where it keeps every token
    top_p: Any
    min_p: Any
    filtered: Any  # whether a filter changes the distribution
    direct: Any  # whether rows hold probabilities that are used as they are


class WeightParams(NamedTuple):
    """The parameters of P(v) = exp((logits[v] - offset) * inv_t - remainder)."""

    threshold: Any
    offset: Any
    remainder: Any
    inv_t: Any


@triton.jit
def sequence_params(call, b, v, GREEDY: tl.constexpr, DIRECT: tl.constexpr):
    """(SequenceParams, whether all are in range) of sequence b.

    With DIRECT the rows hold probabilities, and where no parameter changes them they are not
    normalised again.
    """
    temperature = parameter(call.temperatures, call.temperature, b)
    k = parameter(call.top_ks, call.top_k, b, tl.int32)
    p = parameter(call.top_ps, call.top_p, b)
    min_p = parameter(call.min_ps, call.min_p, b)
    # Comparisons with NaN are false, so NaN is out of range everywhere.
    good = (temperature >= 0) & (temperature < INF) & (k >= 0)
    good = good & (p > 0) & (p <= 1) & (min_p >= 0) & (min_p <= 1)
    k = tl.where(k < v, k, 0)
    filtered = (k > 0) | (p < 1) | (min_p > 0)
    if GREEDY:
        temperature = tl.full([], 0.0, tl.float64)
    direct = (temperature == 1) & (filtered == 0) & DIRECT
    filtered = filtered & (temperature > 0)
    return SequenceParams(temperature, inverse(temperature), k, p, min_p, filtered, direct), good


@triton.jit
def store_tile(stats, tile, logits, noise, threshold, inv_t, STATS: tl.constexpr):
    """Store the statistics of one tile. noise: unit exponentials, which only GUMBEL reads."""
    maximum = tl.max(logits, 0)
    tl.store(stats.maxima + tile, maximum)
    if STATS != MAXIMA:
        weights = exp_weights(logits, maximum, threshold, inv_t)
        tl.store(stats.sums + tile, tl.sum(exp_units(weights), 0))
    if STATS == GUMBEL:
        base = tl.where(maximum == -INF, 0.0, maximum)
        keep = (logits >= threshold) & (logits < INF)
        # Gumbel noise is -log of an exponential.
        score = tl.where(keep, (logits - base) * inv_t - tl.log(noise), -INF)
        best = tl.max(score, 0)
        index = tl.arange(0, logits.shape[0])
        tl.store(stats.maxima + stats.tiles + tile, best)
        first = tl.min(tl.where(score == best, index, logits.shape[0] - 1), 0)
        tl.store(stats.sums + stats.tiles + tile, first.to(tl.int64))


@triton.jit
def row_log_sum(stats, maximum, inv_t, LOG_TILES: tl.constexpr, BLOCK: tl.constexpr):
    """log of the sum of exp((l - maximum) / T) over the survivors of a valid row, float64."""
    total = row_total(stats, maximum, inv_t, False, LOG_TILES, BLOCK)
    return tl.log(total.to(tl.float64) * (2.0 ** (LOG_TILES - 50)))


@triton.jit
def tile_ids(tile, listed, ids, LISTS: tl.constexpr, TILE: tl.constexpr):
    """[TILE] ids of a tile. With LISTS a row with `listed` >= 0 has that many of them in `ids`."""
    index = tl.arange(0, TILE)
    out = tile * TILE + index
    if LISTS:
        there = index < tl.where(tile == 0, listed, 0)
        out = tl.where(listed >= 0, tl.load(ids + index, mask=there, other=ABSENT), out)
    return out


@triton.jit
def load_raw(row, ids, v, PROBS: tl.constexpr):
    """The entries of some tokens, float32; those of tokens from v on have no probability."""
    if PROBS:
        raw = load_entries(row, ids, ids < v, 0.0).to(tl.float32)
    else:
        raw = load_entries(row, ids, ids < v, float("-inf")).to(tl.float32)
    return raw


@triton.jit
def draw_token(
    row, v, stats, listed, ids, maximum, threshold, inv_t, u, LISTS: tl.constexpr,
    PROBS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """The inverse CDF at u of a row whose tile statistics are filled."""
    total = row_total(stats, maximum, inv_t, False, LOG_TILES, BLOCK)
    tile, rest = choose_tile(
        stats, maximum, inv_t, u * total.to(tl.float64), False, LOG_TILES, BLOCK
    )
    tokens = tile_ids(tile, listed, ids, LISTS, TILE)
    logits = as_logits(load_raw(row, tokens, v, PROBS), PROBS)
    units = exp_units(exp_weights(logits, tl.max(logits, 0), threshold, inv_t))
    return token_at(tokens, choose_in_tile(units, rest, TILE), TILE)


@triton.jit
def token_at(tokens, place, TILE: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, TILE) == place, tokens, 0), 0).to(tl.int64)


@triton.jit
def gumbel_argmax(
    stats, maximum, listed, ids, inv_t, LISTS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of the best Gumbel score; scores are compared across tiles in float64."""
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], 0, tl.int64)
    for t in range(0, stats.tiles, BLOCK):
        index = t + tl.arange(0, BLOCK)
        inside = index < stats.tiles
        own = tl.load(stats.maxima + index, mask=inside, other=float("-inf")).to(tl.float64)
        score = tl.load(
            stats.maxima + stats.tiles + index, mask=inside, other=float("-inf")
        ).to(tl.float64)  # fmt: skip
        base = tl.where(own > -INF, (own - maximum.to(tl.float64)) * inv_t.to(tl.float64), 0.0)
        score = score + base
        high = tl.max(score, 0)
        first = tl.min(tl.where(score == high, index, 0x7FFFFFFF), 0)
        if high > best:
            winner = first * TILE + tl.load(stats.sums + stats.tiles + first)
            best = high
    if LISTS:
        winner = tl.where(listed >= 0, tl.load(ids + winner, mask=listed >= 0, other=0), winner)
    return winner


@triton.jit
def log_probability(
    row, token, v, direct, temperature, maximum, log_sum, threshold, PROBS: tl.constexpr
):
    """log P of a token of one row, float64; -inf where the row has no such token."""
    inside = (token >= 0) & (token < v)
    raw = load_raw(row, tl.where(inside, token, v), v, PROBS)
    logit = as_logits(raw, PROBS)
    exact = logit.to(tl.float64)
    if PROBS:
        # The statistics of a processed row come from float32 logarithms. The numerator must be
        # rounded alike, so that the rounding cancels.
        exact = tl.where(direct, log64(raw.to(tl.float64)), exact)
    kept = inside & (logit >= threshold)
    return tl.where(kept, (exact - maximum.to(tl.float64)) / temperature - log_sum, -INF)


@triton.jit
def weight_params(maximum, log_sum, threshold, temperature, inv_t):
    """WeightParams of a row.

    The offset is near T * logsumexp, whatever float32 `maximum` the statistics are relative to: P
    and a `SampledDraft` of one row have the same weights.
    """
    peak = maximum.to(tl.float64)
    offset = peak + log_sum * temperature
    offset = tl.minimum(tl.maximum(offset, -3.4028234663852886e38), FLT_MAX).to(tl.float32)
    remainder = (peak - offset.to(tl.float64)) / tl.maximum(temperature, 1e-300) + log_sum
    return WeightParams(threshold, offset, remainder.to(tl.float32), inv_t)


@triton.jit
def probabilities(logits, weights):
    """P of a tile, float32. P and Q use one expression, so that equal ones cancel exactly."""
    keep = (logits >= weights.threshold) & (logits < INF)
    scale = tl.zeros(logits.shape, tl.float32) + weights.inv_t
    remainder = tl.zeros_like(logits) - weights.remainder
    return tl.where(keep, tl.exp(tl.fma(logits - weights.offset, scale, remainder)), 0.0)
