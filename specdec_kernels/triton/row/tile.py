"""One vocabulary row in fixed tiles: tile masses, row totals and the inverse CDF.

Terms of this room:

tile         TILE neighbouring entries of a row. The size is fixed, because rounding depends on it.
mass         The sum of the weights of a tile or a row, as an integer (see below).
statistics   The maximum and the mass of each tile (`TileStats`), and what follows from them for the
             row: maximum, filter threshold and logarithm of the sum.
linear       Weights that are given as they are (a residual), not as exponentials of logits. Tiles
             of a linear row have a power of two near their largest weight in place of a maximum.

Masses are integers. A tile's weights are scaled by its own maximum, cut to 50 bits and summed in
int64; tiles are then rescaled in float64 and summed in int64 again. An integer sum has no order, so
neither the layout that the compiler picks for a kernel, nor the alignment of a row, nor the warp
size can change a bit of a total or of a prefix sum. The cut (2^-50 of the largest weight) is finer
than the rounding of any float32 sum.

Device code passes records (`NamedTuple`). A record with a member that may be None, such as an
optional tensor, can only be an argument: Triton 3.6 returns none from a function. Compile-time
constants are not members of records, because Triton turns them into run-time values there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

INF = tl.constexpr(float("inf"))
FLT_MAX = tl.constexpr(3.4028234663852886e38)
EXP_UNIT = tl.constexpr(float(2**50))
LINEAR_UNIT = tl.constexpr(float(2**48))
# Tiles on their way from memory while one is worked on.
STAGES = tl.constexpr(3)


class TileStats(NamedTuple):
    """Where the statistics of one row's tiles are in scratch memory."""

    maxima: Any  # float32 [planes, tiles]: largest logits (linear: scales); best Gumbel scores
    sums: Any  # int64 [planes, tiles]: masses; the index of the best score in its tile
    tiles: Any


class Row(NamedTuple):
    """A row in memory. Where all tokens are allowed, `allowed` points to floats, as `entries`
    does, so that kernels know it when they are compiled."""

    entries: Any
    allowed: Any  # int32 words of a bitmask


def allowed_words(rows: Tensor, bitmask: Tensor | None, flat: bool) -> tuple[Tensor, int, int]:
    """(`allowed` of the first of some rows, words from one sequence and from one row to the next).

    flat: the rows have no dimension for sequences.
    """
    if bitmask is None:
        return rows, 0, 0
    return bitmask, 0 if flat else bitmask.stride(0), bitmask.stride(-2)


@triton.jit
def load_entries(row, ids, inside, other: tl.constexpr):
    """The entries of some tokens; `other` where not `inside` or not allowed."""
    if row.allowed.dtype.element_ty == tl.int32:
        word = tl.load(row.allowed + ids // 32, mask=inside, other=0)
        inside = inside & (((word >> (ids % 32)) & 1) != 0)
    return tl.load(row.entries + ids, mask=inside, other=other)


@triton.jit
def parameter(pointer, scalar, b, DTYPE: tl.constexpr = tl.float64):
    """A per-sequence tensor [B] or a scalar, as DTYPE."""
    return tl.full([], 0, DTYPE) + scalar if pointer is None else tl.load(pointer + b).to(DTYPE)


@triton.jit
def flag(value):
    """An int32 scalar of a constexpr, which `tl.full` takes for an object in the interpreter."""
    return tl.full([], 0, tl.int32) + value


@triton.jit
def inverse(temperature):
    """min(1 / T, FLT_MAX) in float32; T is float64 and may be 0."""
    return tl.minimum(1.0 / tl.maximum(temperature, 1e-300), FLT_MAX).to(tl.float32)


@triton.jit
def load_tile(row, tile, v, other: tl.constexpr, TILE: tl.constexpr):
    """[TILE] float32 of a `Row`; `other` past its end and where not allowed."""
    start = tile * TILE
    index = tl.arange(0, TILE)
    return load_entries(row, start + index, index < v - start, other).to(tl.float32)


@triton.jit
def as_logits(raw, PROBS: tl.constexpr):
    """Logits of a loaded tile. Invalid values become +inf, so that the maximum shows them."""
    if PROBS:
        good = (raw >= 0) & (raw < INF)
        logits = tl.where(good, tl.log(tl.where(good & (raw > 0), raw, 1.0)), INF)
        logits = tl.where(raw == 0, -INF, logits)
    else:
        logits = tl.where(raw < INF, raw, INF)
    return logits


@triton.jit
def load_logits(row, tile, v, PROBS: tl.constexpr, TILE: tl.constexpr):
    if PROBS:
        raw = load_tile(row, tile, v, 0.0, TILE)
    else:
        raw = load_tile(row, tile, v, float("-inf"), TILE)
    return as_logits(raw, PROBS)


@triton.jit
def log64(x):
    """log of a float64 scalar >= 0."""
    return tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), -INF)


@triton.jit
def finite(maximum):
    """Whether a row with this maximum is valid."""
    return (maximum < INF) & (maximum > -INF)


@triton.jit
def exp_weights(logits, maximum, threshold, inv_t):
    """Weights of one tile in units of its `maximum`, float32 in [0, 1]."""
    base = tl.where(maximum == -INF, 0.0, maximum)
    keep = (logits >= threshold) & (logits < INF)
    return tl.where(keep, tl.exp((logits - base) * inv_t), 0.0)


@triton.jit
def exp_units(weights):
    return (weights * EXP_UNIT).to(tl.int64)


@triton.jit
def linear_units(weights):
    """Non-negative weights [TILE] -> (a power of two near their maximum, int64 multiples of it)."""
    weights = tl.where(weights < INF, weights, 0.0)
    exponent = tl.max(weights, 0).to(tl.int32, bitcast=True) & 0x7F800000
    # 2^-e must be a normal float32 too.
    exponent = tl.minimum(tl.maximum(exponent, 0x00800000), 0x7E800000)
    scale = exponent.to(tl.float32, bitcast=True)
    inverse_scale = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return scale, (weights * inverse_scale * LINEAR_UNIT).to(tl.int64)


@triton.jit
def row_maximum(stats, BLOCK: tl.constexpr):
    """The largest tile maximum (float32); +inf where the row holds an invalid value."""
    maximum = tl.full([], float("-inf"), tl.float32)
    for t in range(0, stats.tiles, BLOCK):
        index = t + tl.arange(0, BLOCK)
        part = tl.load(stats.maxima + index, mask=index < stats.tiles, other=float("-inf"))
        maximum = tl.maximum(maximum, tl.max(part, 0))
    return maximum


@triton.jit
def tile_masses(
    stats, t, maximum, inv_t, LINEAR: tl.constexpr, LOG_TILES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[BLOCK] int64 masses of the tiles from t on, and the float64 factors that rescaled them."""
    index = t + tl.arange(0, BLOCK)
    inside = index < stats.tiles
    units = tl.load(stats.sums + index, mask=inside, other=0).to(tl.float64)
    if LINEAR:
        own = tl.load(stats.maxima + index, mask=inside, other=0.0)
        factors = own.to(tl.float64) / maximum.to(tl.float64)
    else:
        own = tl.load(stats.maxima + index, mask=inside, other=float("-inf"))
        factors = tl.exp((own.to(tl.float64) - maximum.to(tl.float64)) * inv_t.to(tl.float64))
    # Each tile's sum is at most 2^62, so this keeps the row's total below 2^63.
    return (units * (factors * (1.0 / (1 << LOG_TILES)))).to(tl.int64), factors


@triton.jit
def row_total(
    stats, maximum, inv_t, LINEAR: tl.constexpr, LOG_TILES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The int64 mass of the row in units of 2^(LOG_TILES - 50) of its largest weight."""
    total = tl.full([], 0, tl.int64)
    for t in range(0, stats.tiles, BLOCK):
        mass, _ = tile_masses(stats, t, maximum, inv_t, LINEAR, LOG_TILES, BLOCK)
        total += tl.sum(mass, 0)
    return total


@triton.jit
def choose_tile(
    stats, maximum, inv_t, target, LINEAR: tl.constexpr, LOG_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first tile whose prefix mass exceeds `target`, or else the last one with mass.

    Returns its index and the part of `target` that falls into it, in units of its own sum.
    """
    chosen = tl.full([], -1, tl.int32)
    rest = tl.full([], 0.0, tl.float64)
    found = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int64)
    for t in range(0, stats.tiles, BLOCK):
        if found == 0:
            mass, factors = tile_masses(stats, t, maximum, inv_t, LINEAR, LOG_TILES, BLOCK)
            index = tl.arange(0, BLOCK)
            prefix = before + tl.cumsum(mass, 0)
            first = tl.min(tl.where(prefix.to(tl.float64) > target, index, BLOCK), 0)
            last = tl.max(tl.where(mass > 0, index, -1), 0)
            found = (first < BLOCK).to(tl.int32)
            pick = tl.where(found > 0, first, last)
            if pick >= 0:
                here = index == pick
                start = tl.sum(tl.where(here, prefix - mass, 0), 0)
                factor = tl.sum(tl.where(here, factors, 0.0), 0)
                chosen = (t + pick).to(tl.int32)
                rest = (target - start.to(tl.float64)) / (factor * (1.0 / (1 << LOG_TILES)))
            before += tl.sum(mass, 0)
    return chosen, rest


@triton.jit
def choose_in_tile(units, target, TILE: tl.constexpr):
    """The first of [TILE] int64 weights whose prefix sum exceeds target, or else the last > 0."""
    index = tl.arange(0, TILE)
    prefix = tl.cumsum(units, 0)
    hit = (prefix.to(tl.float64) > target) & (units > 0)
    first = tl.min(tl.where(hit, index, TILE), 0)
    last = tl.max(tl.where(units > 0, index, 0), 0)
    return tl.where(first < TILE, first, last)


@triton.jit
def first_tile(stats, maximum, BLOCK: tl.constexpr):
    """The index of the first tile whose maximum is that of the row."""
    chosen = tl.full([], 0x7FFFFFFF, tl.int32)
    for t in range(0, stats.tiles, BLOCK):
        index = t + tl.arange(0, BLOCK)
        part = tl.load(stats.maxima + index, mask=index < stats.tiles, other=float("-inf"))
        hit = (part == maximum) & (index < stats.tiles)
        chosen = tl.minimum(chosen, tl.min(tl.where(hit, index, 0x7FFFFFFF), 0))
    return chosen


@triton.jit
def row_argmax(
    row, v, stats, maximum, PROBS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The lowest id of the maximum."""
    tile = first_tile(stats, maximum, BLOCK)
    logits = load_logits(row, tile, v, PROBS, TILE)
    index = tl.arange(0, TILE)
    return tile * TILE + tl.min(tl.where(logits == maximum, index, TILE), 0)
