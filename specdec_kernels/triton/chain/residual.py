"""The third launch: tile masses of the residual max(p_scale * P - lenience * Q, 0).

`p_scale` is 1 except in rule block, which needs the residual of every row, and the mass of the
negative part too. Other rules need that of the first row whose draft is rejected.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import launch
from ..row.distribution import load_raw, probabilities, tile_ids, token_at, weight_params
from ..row.draft import (
    DRAFT_PROBS,
    DRAFT_ROWS,
    KEEP,
    ONE_HOT,
    SAMPLED,
    SUBTRACT,
    Draft,
    DraftDistribution,
    column_probs,
    draft_probs,
    draft_row,
)
from ..row.tile import (
    INF,
    Row,
    TileStats,
    as_logits,
    choose_in_tile,
    choose_tile,
    flag,
    inverse,
    linear_units,
    row_maximum,
    row_total,
)
from .sequence import (
    ACCEPT_PROB,
    BLOCK_RULE,
    DRAFT_LOG_SUM,
    DRAFT_MAXIMUM,
    DRAFT_THRESHOLD,
    FIELDS,
    LENIENT,
    LISTED,
    LOG_SUM,
    MAXIMUM,
    MODE,
    P_SCALE,
    TARGET_ROWS,
    THRESHOLD,
    VALID,
    Call,
    Scratch,
    Target,
    find_drafts,
    first_rejected,
    open_sequence,
    target_row,
)


class Residual(NamedTuple):
    """The two distributions of a row, and where the tile masses of their residual are."""

    row: Row  # of the target
    v: Any
    direct: Any
    weights: Any  # of P
    listed: Any  # see distribution.py; -1 where the masses are those of the whole row
    ids: Any
    q: DraftDistribution
    p_scale: Any
    lenience: Any
    stats: TileStats  # of the positive part; those of the negative part follow
    maxima: Any  # of P's entries in each tile, then of Q's


@triton.jit
def residual_of(
    target, draft, call, scratch, b, i, count, begin, params, draft_temperature, place,
    RULE: tl.constexpr, DRAFT: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """The Residual of row i, where only the first `count` rows have a draft."""
    index = b * (call.gamma + 1) + i
    summary = scratch.summaries + index * FIELDS
    mode = tl.where(i < count, tl.load(summary + MODE), 0.0).to(tl.int32)
    weights = weight_params(
        tl.load(summary + MAXIMUM), tl.load(summary + LOG_SUM),
        tl.load(summary + THRESHOLD).to(tl.float32), params.temperature, params.inv_t,
    )  # fmt: skip
    q_weights = weight_params(
        tl.load(summary + DRAFT_MAXIMUM), tl.load(summary + DRAFT_LOG_SUM),
        tl.load(summary + DRAFT_THRESHOLD).to(tl.float32), draft_temperature,
        inverse(draft_temperature),
    )  # fmt: skip
    row = target_row(target, b, begin + i)
    q_row = row
    q_place = i
    if DRAFT != ONE_HOT:
        q_row, q_place, _there = draft_row(draft, b, i, begin, call.gamma)
    x = tl.load(call.draft_token_ids + b * call.gamma + i, mask=i < count, other=-1).to(tl.int64)
    p_scale = tl.full([], 1.0, tl.float32)
    listed = tl.load(summary + LISTED).to(tl.int32)
    if RULE == BLOCK_RULE:
        scale = tl.load(summary + P_SCALE).to(tl.float32)
        p_scale = tl.where(mode == KEEP, 1.0, scale)
        listed = flag(-1)  # the negative part has mass at every token
    lenience = tl.full([], 1.0, tl.float32)
    if RULE == LENIENT:
        lenience = lenience * call.lenience
    stats = TileStats(
        scratch.residual_maxima + place * 4 * scratch.most,
        scratch.residual_sums + place * 2 * scratch.most, scratch.most,
    )  # fmt: skip
    return Residual(
        row, target.v, params.direct,
        weights, listed, scratch.ids + index * LIST,
        DraftDistribution(q_row, q_place, mode, x, q_weights), p_scale, lenience, stats,
        scratch.residual_maxima + place * 4 * scratch.most + 2 * scratch.most,
    )  # fmt: skip


@triton.jit
def with_mode(r, mode):
    """The Residual in another mode."""
    q = DraftDistribution(r.q.row, r.q.place, mode, r.q.token, r.q.weights)
    p_scale = tl.where(mode == KEEP, 1.0, r.p_scale)
    return Residual(
        r.row, r.v, r.direct, r.weights, r.listed, r.ids, q, p_scale, r.lenience, r.stats, r.maxima
    )


@triton.jit
def tile_residual(
    r, draft, tokens, PROBS: tl.constexpr, DRAFT: tl.constexpr
):  # fmt: skip
    """(p_scale * P - lenience * Q at some tokens, float32; the maxima of both rows there)."""
    raw = load_raw(r.row, tokens, r.v, PROBS)
    p_max = tl.full([], 1.0, tl.float32)
    probs = probabilities(as_logits(raw, PROBS), r.weights)
    if PROBS:
        p_max = tl.max(tl.where((raw >= 0) & (raw < INF), raw, INF), 0)
        probs = tl.where(r.direct, raw, probs)
    q_probs, q_max = draft_probs(r.q, draft, tokens, r.v, DRAFT)
    return probs * r.p_scale - q_probs * r.lenience, p_max, q_max


@triton.jit
def positive(x):
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def fill_tile(
    r, draft, tile, RULE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the masses of one tile of a residual, and the maxima that show invalid rows."""
    LISTS: tl.constexpr = FILTERS and RULE != BLOCK_RULE
    tokens = tile_ids(tile, r.listed, r.ids, LISTS, TILE)
    difference, p_max, q_max = tile_residual(r, draft, tokens, PROBS, DRAFT)
    if DRAFT == DRAFT_PROBS or DRAFT == SAMPLED:  # noqa: SIM109, PLR1714  (no `in` in Triton)
        # A row of logits has been checked; others are checked whole, also where few are read.
        scanned = r.listed >= 0
        if draft.columns is not None:
            scanned = r.q.mode == SUBTRACT
        if scanned:
            columns = tile * TILE + tl.arange(0, TILE)
            inside = columns < tl.where(r.q.mode == SUBTRACT, draft.d, 0)
            _probs, rest = column_probs(r.q, columns, inside, DRAFT)
            q_max = tl.maximum(q_max, rest)
    scale, units = linear_units(positive(difference))
    tl.store(r.stats.maxima + tile, scale)
    tl.store(r.stats.sums + tile, tl.sum(units, 0))
    tl.store(r.maxima + tile, p_max)
    tl.store(r.maxima + r.stats.tiles + tile, q_max)
    if RULE == BLOCK_RULE:
        below = positive(-difference)
        scale, units = linear_units(below)
        scale = tl.where(tl.max(below, 0) < INF, scale, INF)
        tl.store(r.stats.maxima + r.stats.tiles + tile, scale)
        tl.store(r.stats.sums + r.stats.tiles + tile, tl.sum(units, 0))


@launch.kernel(*TARGET_ROWS, *DRAFT_ROWS)
def fill_residuals(
    target: Target, draft: Draft, call: Call, scratch: Scratch,
    RULE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, DIRECT: tl.constexpr,
    DRAFT: tl.constexpr, TILE: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, 1, B), or (tiles, gamma + 1, B) for rule block: a tile of a residual."""
    tile = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    begin, rows, params, draft_temperature, status = open_sequence(
        call, b, target.v, RULE, DIRECT, DRAFT
    )
    if (status == 0) & (params.temperature != 0):
        count, no_bonus, _status_after_drafts = find_drafts(call, rows, b)
        summary = scratch.summaries + b * (call.gamma + 1) * FIELDS
        place = b
        if RULE == BLOCK_RULE:
            place = b * (call.gamma + 1) + i
            # Programs of other tiles store the same value.
            tl.store(summary + i * FIELDS + P_SCALE, prefix_scale(summary, tl.minimum(i, count)))
            tl.debug_barrier()
        else:
            i = first_rejected(summary, count)
        if (i < count) | ((i == count) & (no_bonus == 0)):
            r = residual_of(
                target, draft, call, scratch, b, i, count, begin, params, draft_temperature, place,
                RULE, DRAFT, LIST,
            )  # fmt: skip
            valid = tl.load(summary + i * FIELDS + VALID) > 0
            if valid & (params.direct | (r.q.mode != KEEP)):
                fill_tile(r, draft, tile, RULE, FILTERS, PROBS, DRAFT, TILE)


@triton.jit
def prefix_scale(summary, count):
    """The scale of P after `count` drafts: c_(i+1) = min(c_i * P(x_i) / Q(x_i), 1), c_0 = 1."""
    scale = tl.full([], 1.0, tl.float64)
    for j in range(0, count):
        step = tl.load(summary + j * FIELDS + ACCEPT_PROB)
        kept = (scale > 0) & (step > 0)
        scale = tl.where(kept, tl.minimum(scale * step, 1.0), 0.0)
    return scale


@triton.jit
def largest(maxima, tiles, BLOCK: tl.constexpr):
    return row_maximum(TileStats(maxima, maxima, tiles), BLOCK)


@triton.jit
def invalid_target(r, BLOCK: tl.constexpr):
    """Whether a row of probabilities that are used as they are turned out invalid in the scan."""
    p_max = largest(r.maxima, r.stats.tiles, BLOCK)
    return r.direct & ((p_max == 0) | (p_max == INF))


@triton.jit
def invalid_draft(r, DRAFT: tl.constexpr, BLOCK: tl.constexpr):
    """Whether a draft row turned out invalid in the scan; plain logits have been checked before."""
    bad = tl.full([], 0, tl.int1)
    if DRAFT == DRAFT_PROBS or DRAFT == SAMPLED:  # noqa: SIM109, PLR1714  (no `in` in Triton)
        q_max = largest(r.maxima + r.stats.tiles, r.stats.tiles, BLOCK)
        bad = (r.q.mode == SUBTRACT) & ((q_max == INF) | (q_max == -INF))
    return bad


@triton.jit
def linear_total(stats, LOG_TILES: tl.constexpr, BLOCK: tl.constexpr):
    """The float64 sum of linear weights, added as integers and so in no order; it may be +inf."""
    scale = row_maximum(stats, BLOCK)
    total = row_total(stats, scale, 1.0, True, LOG_TILES, BLOCK).to(tl.float64)
    return tl.where(scale < INF, total * (2.0 ** (LOG_TILES - 48)) * scale.to(tl.float64), INF)


@triton.jit
def residual_sums(r, LOG_TILES: tl.constexpr, BLOCK: tl.constexpr):
    """(positive sum, negative sum): those of both parts of p_scale * P - Q, as positive numbers."""
    n = r.stats.tiles
    negative = TileStats(r.stats.maxima + n, r.stats.sums + n, n)
    return linear_total(r.stats, LOG_TILES, BLOCK), linear_total(negative, LOG_TILES, BLOCK)


@triton.jit
def draw_residual(
    r, draft, u, RULE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """The inverse CDF at u of a residual whose tile masses are filled and not all 0."""
    LISTS: tl.constexpr = FILTERS and RULE != BLOCK_RULE
    scale = row_maximum(r.stats, BLOCK)
    total = row_total(r.stats, scale, 1.0, True, LOG_TILES, BLOCK).to(tl.float64)
    tile, rest = choose_tile(r.stats, scale, 1.0, u * total, True, LOG_TILES, BLOCK)
    tokens = tile_ids(tile, r.listed, r.ids, LISTS, TILE)
    difference, _p_max, _q_max = tile_residual(r, draft, tokens, PROBS, DRAFT)
    _scale, units = linear_units(positive(difference))
    return token_at(tokens, choose_in_tile(units, rest, TILE), TILE)


@triton.jit
def is_empty(r, LOG_TILES: tl.constexpr, BLOCK: tl.constexpr):
    scale = row_maximum(r.stats, BLOCK)
    return row_total(r.stats, scale, 1.0, True, LOG_TILES, BLOCK) == 0
