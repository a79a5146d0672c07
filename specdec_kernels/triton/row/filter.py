"""Filters as thresholds: the smallest surviving logit of a row. Ties at a threshold are kept.

A key orders float32 values as integers. The maxima of spans, which are parts of a tile, bound the
candidates from below: k spans hold k tokens that are at least as large as the k-th largest of their
maxima. At most LIST candidates are listed, and the thresholds are found among these. Where more
tokens may survive (a large top_k, or top-p over a flat row) `select` searches the whole row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .distribution import ABSENT, load_raw
from .tile import INF, STAGES, as_logits, exp_units, exp_weights, load_logits, row_total

PIVOTS = tl.constexpr(8)
LOWEST = tl.constexpr(-2139095041)  # the key of -inf


class Spans(NamedTuple):
    """The spans of one row in scratch memory."""

    maxima: Any
    reaching: Any  # the indices of those that hold candidates


@triton.jit
def key_of(x):
    """Order-preserving int32 of float32; the two zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pivots_of(low, high):
    """(step, [PIVOTS] int32 keys from `low` on that part [low, high] into equal pieces)."""
    step = (high - low + PIVOTS) // PIVOTS
    return step, (low + step * tl.arange(0, PIVOTS).to(tl.int64)).to(tl.int32)


@triton.jit
def narrowed(low, high, step, weights, need):
    """The piece of [low, high] that holds the largest key whose upper set weighs `need`.

    Weights fall with the pivot, and the first one is known to pass.
    """
    passed = tl.sum((weights.to(tl.float64) >= need).to(tl.int64), 0)
    low += step * (tl.maximum(passed, 1) - 1)
    return low, tl.minimum(low + step - 1, high)


@triton.jit
def select_key(keys, weights, low, high, need):
    """The largest key in [low, high] whose upper set weighs at least `need` (int32, int64).

    The upper set of `low` must weigh at least `need`.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        step, pivots = pivots_of(low, high)
        above = tl.sum(tl.where(keys[None, :] >= pivots[:, None], weights[None, :], 0), 1)
        low, high = narrowed(low, high, step, above, need)
    return low.to(tl.int32)


@triton.jit
def min_p_key(maximum, params):
    """The key of the smallest float32 not below the bound of min-p, which is float64."""
    bound = maximum.to(tl.float64) + params.temperature * tl.log(tl.maximum(params.min_p, 1e-300))
    bound = tl.maximum(bound, -3.4028234663852886e38)
    nearest = bound.to(tl.float32)
    key = key_of(nearest)
    key = tl.where(nearest.to(tl.float64) < bound, key + 1, key)
    return tl.where(params.min_p > 0, key, LOWEST)


@triton.jit
def list_candidates(
    row, v, spans, ids, floor, PROBS: tl.constexpr, TILE: tl.constexpr, SPANS: tl.constexpr,
    SPAN: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Store the ids of the entries whose keys reach `floor` -> their number; only LIST are stored.

    Only spans whose maximum reaches the floor are read.
    """
    index = tl.arange(0, SPANS)
    reach = key_of(tl.load(spans.maxima + index)) >= floor
    tl.store(spans.reaching + tl.cumsum(reach.to(tl.int32), 0) - 1, index, mask=reach)
    entries = tl.sum(reach.to(tl.int32), 0) * SPAN
    tl.debug_barrier()
    count = tl.full([], 0, tl.int32)
    for start in range(0, entries, TILE):
        place = start + tl.arange(0, TILE)
        span = tl.load(spans.reaching + place // SPAN, mask=place < entries, other=0)
        token = tl.where(place < entries, span * SPAN + place % SPAN, ABSENT)
        key = key_of(as_logits(load_raw(row, token, v, PROBS), PROBS))
        taken = ((token < v) & (key >= floor) & (key > LOWEST)).to(tl.int32)
        to = count + tl.cumsum(taken, 0) - 1
        tl.store(ids + to, token, mask=(taken > 0) & (to < LIST))
        count += tl.sum(taken, 0)
    tl.debug_barrier()
    return count


@triton.jit
def listed_threshold(
    row, v, stats, spans, ids, maximum, params, PROBS: tl.constexpr, LOG_TILES: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    """(key of the threshold, number of listed candidates, whether the threshold is exact)."""
    k = params.top_k
    used = tl.cdiv(v, SPAN)
    # Top-p alone has no bound: half of the spans are tried.
    wanted = tl.where(k > 0, k, tl.where(params.top_p < 1, (used + 1) // 2, used + 1))
    floor = tl.full([], LOWEST, tl.int32)
    top = key_of(maximum)
    if wanted <= used:
        maxima = key_of(tl.load(spans.maxima + tl.arange(0, SPANS)))
        one = tl.full([SPANS], 1, tl.int64)
        floor = select_key(maxima, one, floor, top, wanted.to(tl.float64))
    least = min_p_key(maximum, params)
    if params.top_p == 1:
        floor = tl.maximum(floor, least)
    count = tl.full([], LIST + 1, tl.int32)
    if (k <= LIST) & ((floor > LOWEST) | (v <= LIST)):
        count = list_candidates(row, v, spans, ids, floor, PROBS, TILE, SPANS, SPAN, LIST)
    low = floor
    exact = count <= LIST
    if exact & ((k > 0) | (params.top_p < 1)):
        index = tl.arange(0, LIST)
        token = tl.load(ids + index, mask=index < count, other=ABSENT)
        keys = key_of(as_logits(load_raw(row, token, v, PROBS), PROBS))
        if (k > 0) & (count >= k):
            one = (keys > LOWEST).to(tl.int64)
            low = select_key(keys, one, low, top, k.to(tl.float64))
        if params.top_p < 1:
            weights = exp_weights(value_of(keys), maximum, value_of(low), params.inv_t)
            mass = exp_units(tl.where(keys > LOWEST, weights, 0.0))
            total = tl.sum(mass, 0).to(tl.float64)
            if (k == 0) & (floor > LOWEST):
                whole = row_total(stats, maximum, params.inv_t, False, LOG_TILES, BLOCK)
                total = whole.to(tl.float64) * (1 << LOG_TILES)
            exact = tl.sum(mass, 0).to(tl.float64) >= params.top_p * total
            if exact:
                low = select_key(keys, mass, low, top, params.top_p * total)
    return tl.maximum(low, least), count, exact


@triton.jit
def row_threshold(
    row, v, maximum, params, PROBS: tl.constexpr, LOG_TILES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The key of the threshold of a valid row, found in the whole row."""
    low = tl.full([], LOWEST, tl.int64)
    high = key_of(maximum).to(tl.int64)
    if params.top_k > 0:
        need = params.top_k.to(tl.float64)
        low = select(row, v, low, high, need, maximum, params.inv_t, False, PROBS, LOG_TILES, CHUNK)
    if params.top_p < 1:
        need = params.top_p
        low = select(row, v, low, high, need, maximum, params.inv_t, True, PROBS, LOG_TILES, CHUNK)
    return tl.maximum(low.to(tl.int32), min_p_key(maximum, params))


@triton.jit
def select(
    row, v, low, high, need, maximum, inv_t, MASS: tl.constexpr, PROBS: tl.constexpr,
    LOG_TILES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high] whose upper set weighs at least `need` (int64 scalars).

    With MASS a token weighs its probability and `need` is a share of the mass from `low` on;
    without, every token weighs one. The upper set of `low` must weigh at least `need`.
    """
    enough = tl.full([], 0.0, tl.float64)
    known = tl.full([], 0, tl.int32)
    unit = tl.full([], 2.0 ** (50 - LOG_TILES), tl.float32)
    while low < high:
        step, pivots = pivots_of(low, high)
        weight = tl.zeros([PIVOTS, CHUNK], tl.int64)
        for t in tl.range(0, tl.cdiv(v, CHUNK), num_stages=STAGES):
            logits = load_logits(row, t, v, PROBS, CHUNK)
            if MASS:
                one = (exp_weights(logits, maximum, -INF, inv_t) * unit).to(tl.int64)
            else:
                one = (tl.arange(0, CHUNK) < v - t * CHUNK).to(tl.int64)
            weight += tl.where(key_of(logits)[None, :] >= pivots[:, None], one[None, :], 0)
        above = tl.sum(weight, 1)
        if known == 0:
            whole = tl.sum(tl.where(tl.arange(0, PIVOTS) == 0, above.to(tl.float64), 0.0), 0)
            enough = need * whole if MASS else need
            known += 1
        low, high = narrowed(low, high, step, above, enough)
    return low
