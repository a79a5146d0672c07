"""The first two launches of `verify_chain` and `sample`: a summary of every row.

`tile_statistics` reads the rows, one program for each tile. `summarize_rows` makes the summary of a
row from its tiles, finds the threshold of its filters, and tests its draft as if all drafts before
were accepted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import launch
from ..row.distribution import (
    GUMBEL,
    MASSES,
    MAXIMA,
    gumbel_argmax,
    load_raw,
    log_probability,
    row_log_sum,
    store_tile,
    tile_ids,
)
from ..row.draft import (
    DRAFT_LOGITS,
    DRAFT_ROWS,
    KEEP,
    ONE_HOT,
    REMOVE,
    SAMPLED,
    SUBTRACT,
    Draft,
    draft_probability,
    draft_row,
)
from ..row.filter import Spans, listed_threshold, row_threshold, value_of
from ..row.noise import ACCEPT, tile_exponentials, token_exponentials
from ..row.tile import (
    FLT_MAX,
    INF,
    STAGES,
    TileStats,
    as_logits,
    finite,
    flag,
    load_entries,
    load_logits,
    log64,
    row_argmax,
    row_maximum,
)
from .sequence import (
    ACCEPT_PROB,
    ACCEPTED,
    BLOCK_RULE,
    CHOSEN,
    DRAFT_LOG_SUM,
    DRAFT_MAXIMUM,
    DRAFT_THRESHOLD,
    FIELDS,
    LENIENT,
    LISTED,
    LOG_SUM,
    LOGPROB,
    MAXIMUM,
    MODE,
    TARGET_ROWS,
    THRESHOLD,
    VALID,
    Call,
    Scratch,
    Target,
    open_sequence,
    row_uniform,
    stats_of,
    target_row,
)

LOG_OF_ZERO = tl.constexpr(-745.13321910194122)  # a probability of this logarithm is 0 in float64


@launch.kernel(*TARGET_ROWS, *DRAFT_ROWS)
def tile_statistics(
    target: Target, draft: Draft, call: Call, scratch: Scratch,
    RULE: tl.constexpr, STATS: tl.constexpr, STREAM: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, DIRECT: tl.constexpr, DRAFT: tl.constexpr,
    TILE: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, gamma + 1, B): a tile of a target row and of its draft row, unfiltered."""
    tile = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    begin, rows, params, _temperature, status = open_sequence(
        call, b, target.v, RULE, DIRECT, DRAFT
    )
    index = b * (call.gamma + 1) + i
    if (i < rows) & (tile < scratch.tiles) & (status == 0) & (params.direct == 0):
        row = target_row(target, b, begin + i)
        logits = load_logits(row, tile, target.v, PROBS, TILE)
        noise = logits
        if STATS == GUMBEL:
            seed = tl.load(call.seeds + b).to(tl.int64)
            position = tl.load(call.positions + b).to(tl.int64) + i
            noise = tile_exponentials(tile, seed, position, STREAM, TILE)
        stats = stats_of(scratch, index, scratch.tiles)
        store_tile(stats, tile, logits, noise, float("-inf"), params.inv_t, STATS)
        if FILTERS:
            maxima = tl.max(tl.reshape(logits, [TILE // SPAN, SPAN]), 1)
            span = tile * (TILE // SPAN) + tl.arange(0, TILE // SPAN)
            tl.store(scratch.spans + index * SPANS + span, maxima)
            # No tile has the last spans, up to a power of two.
            if tile == scratch.tiles - 1:
                rest = tl.arange(0, SPANS)
                there = rest >= scratch.tiles * (TILE // SPAN)
                tl.store(scratch.spans + index * SPANS + rest, float("-inf"), mask=there)
    if DRAFT == DRAFT_LOGITS:
        row, _place, there = draft_row(draft, b, i, begin, call.gamma)
        if (i < rows - 1) & there & (tile < scratch.d_tiles) & (status == 0):
            logits = load_logits(row, tile, draft.d, False, TILE)
            stats = stats_of(scratch, scratch.draft + index, scratch.d_tiles)
            store_tile(stats, tile, logits, logits, float("-inf"), params.inv_t, MASSES)


@triton.jit
def filter_row(
    row, v, stats, spans, ids, maximum, params, call, b, i, STATS: tl.constexpr,
    STREAM: tl.constexpr, PROBS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    """Fill the tile statistics of a valid row anew under its filters -> (threshold, listed)."""
    seed = tl.load(call.seeds + b).to(tl.int64)
    position = tl.load(call.positions + b).to(tl.int64) + i
    key, count, exact = listed_threshold(
        row, v, stats, spans, ids, maximum, params, PROBS, LOG_TILES, TILE, BLOCK, SPANS, SPAN, LIST
    )
    listed = tl.where(exact, count, -1)
    if exact:
        threshold = value_of(key)
        tokens = tile_ids(0, listed, ids, True, LIST)
        logits = as_logits(load_raw(row, tokens, v, PROBS), PROBS)
        noise = logits
        if STATS == GUMBEL:
            noise = token_exponentials(tokens, seed, position, STREAM)
        tl.debug_barrier()
        one = TileStats(stats.maxima, stats.sums, 1)
        store_tile(one, 0, logits, noise, threshold, params.inv_t, STATS)
    else:
        threshold = value_of(row_threshold(row, v, maximum, params, PROBS, LOG_TILES, CHUNK))
        tl.debug_barrier()
        for t in tl.range(0, stats.tiles, num_stages=STAGES):
            logits = load_logits(row, t, v, PROBS, TILE)
            noise = logits
            if STATS == GUMBEL:
                noise = tile_exponentials(t, seed, position, STREAM, TILE)
            store_tile(stats, t, logits, noise, threshold, params.inv_t, STATS)
    tl.debug_barrier()
    return threshold, listed


@triton.jit
def accept_near_maximum(row, x, best, v, lenience, PROBS: tl.constexpr):
    """Rule lenient at temperature 0: P(x) >= lenience * P(best), with P at temperature 1."""
    known = (x >= 0) & (x < v)
    high = tl.load(row.entries + best).to(tl.float64)
    if PROBS:
        near = load_entries(row, x, known, 0).to(tl.float64) >= lenience * high
    else:
        low = load_entries(row, x, known, float("-inf")).to(tl.float64)
        near = low - high >= tl.log(lenience)
    return known & near


@triton.jit
def ratio(p_x, q_x, logprob, log_q_x, direct, PROBS: tl.constexpr, DRAFT: tl.constexpr):
    """P(x) / Q(x), float64; 0 where P(x) is 0, whatever Q(x)."""
    out = tl.where(logprob > LOG_OF_ZERO, tl.exp(logprob - log_q_x), 0.0)
    if PROBS and DRAFT != SAMPLED:
        # Both probabilities were given: their logarithms would add rounding errors.
        quotient = tl.where(q_x > 0, p_x / tl.where(q_x > 0, q_x, 1.0), INF)
        out = tl.where(direct, tl.where(p_x > 0, quotient, 0.0), out)
    return out


@triton.jit
def draft_summary(
    draft, call, scratch, b, i, begin, index, x, v, params, draft_temperature,
    DRAFT: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """(Q(x), log Q(x), maximum, log_sum, threshold, mode) of draft i.

    The mode is KEEP where x is drafted only if the draft's row is not valid.
    """
    q_x = tl.full([], 1.0, tl.float64)
    log_q_x = tl.full([], 0.0, tl.float64)
    maximum = tl.full([], 0.0, tl.float32)
    log_sum = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], float("-inf"), tl.float32)
    mode = tl.where(x < 0, KEEP, REMOVE).to(tl.int32)
    if DRAFT != ONE_HOT:  # noqa: SIM102  (compiled in only where there are rows)
        if (x >= 0) & (draft_temperature != 0):
            row, place, valid = draft_row(draft, b, i, begin, call.gamma)
            if valid:
                if DRAFT == DRAFT_LOGITS:
                    stats = stats_of(scratch, scratch.draft + index, scratch.d_tiles)
                    maximum = row_maximum(stats, BLOCK)
                    valid = finite(maximum)
                    if valid:
                        log_sum = row_log_sum(stats, maximum, params.inv_t, LOG_TILES, BLOCK)
                elif DRAFT == SAMPLED:
                    statistic = b * call.gamma + i
                    if draft.chosen is not None:
                        statistic = place
                    logsumexp = tl.load(call.draft_logsumexp + statistic)
                    threshold = tl.load(call.draft_threshold + statistic)
                    valid = (tl.abs(logsumexp) < INF) & (threshold >= -INF)  # not NaN
                    near = tl.minimum(tl.maximum(logsumexp * draft_temperature, -FLT_MAX), FLT_MAX)
                    maximum = near.to(tl.float32)
                    log_sum = logsumexp - maximum.to(tl.float64) / draft_temperature
            if valid:
                q_x, log_q_x, valid = draft_probability(
                    draft, row, place, x, v, draft_temperature, maximum, log_sum, threshold,
                    DRAFT,
                )  # fmt: skip
            mode = tl.where(valid, SUBTRACT, KEEP).to(tl.int32)
    return q_x, log_q_x, maximum, log_sum, threshold, mode


@launch.kernel(*TARGET_ROWS, *DRAFT_ROWS)
def summarize_rows(
    target: Target, draft: Draft, call: Call, scratch: Scratch,
    RULE: tl.constexpr, STATS: tl.constexpr, STREAM: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, DIRECT: tl.constexpr, DRAFT: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    SPANS: tl.constexpr, SPAN: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Grid (gamma + 1, B): the summary of one row."""
    i = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    begin, rows, params, draft_temperature, status = open_sequence(
        call, b, target.v, RULE, DIRECT, DRAFT
    )
    v = target.v
    index = b * (call.gamma + 1) + i
    maximum = tl.full([], 0.0, tl.float32)
    threshold = tl.full([], float("-inf"), tl.float32)
    log_sum = tl.full([], 0.0, tl.float64)
    listed = flag(-1)
    valid = tl.full([], 0, tl.int1)
    accepted = tl.full([], 0, tl.int1)
    accept_prob = tl.full([], float("nan"), tl.float64)
    logprob = tl.full([], 0.0, tl.float64)
    chosen = tl.full([], -1, tl.int64)
    q_maximum = tl.full([], 0.0, tl.float32)
    q_log_sum = tl.full([], 0.0, tl.float64)
    q_threshold = tl.full([], float("-inf"), tl.float32)
    mode = flag(KEEP)
    if (status == 0) & (i < rows):
        row = target_row(target, b, begin + i)
        x = tl.load(
            call.draft_token_ids + b * call.gamma + i, mask=i < call.gamma, other=-1
        ).to(tl.int64)  # fmt: skip
        x = tl.where(x < call.id_limit, tl.maximum(x, -1), -1)
        stats = stats_of(scratch, index, scratch.tiles)
        ids = scratch.ids + index * LIST
        p_x = tl.full([], 0.0, tl.float64)
        if params.direct:  # only the drafted token is read
            p_x = load_entries(row, x, (x >= 0) & (x < v), 0).to(tl.float64)
            valid = (p_x >= 0) & (p_x < INF)
        else:
            maximum = row_maximum(stats, BLOCK)
            valid = finite(maximum)
            if FILTERS:  # noqa: SIM102  (compiled in only where some sequence may have a filter)
                if valid & params.filtered:
                    spans = Spans(scratch.spans + index * SPANS, scratch.reaching + index * SPANS)
                    threshold, listed = filter_row(
                        row, v, stats, spans, ids, maximum, params, call, b, i, STATS, STREAM,
                        PROBS, TILE, CHUNK, BLOCK, LOG_TILES, SPANS, SPAN, LIST,
                    )  # fmt: skip
            stats = TileStats(stats.maxima, stats.sums, tl.where(listed >= 0, 1, stats.tiles))
            if STATS != MAXIMA:  # noqa: SIM102
                if valid & (params.temperature != 0):
                    log_sum = row_log_sum(stats, maximum, params.inv_t, LOG_TILES, BLOCK)
        if valid & (params.temperature == 0):
            chosen = row_argmax(row, v, stats, maximum, PROBS, TILE, BLOCK).to(tl.int64)
            threshold = maximum
            accepted = chosen == x
            if RULE == LENIENT:
                lenience = tl.full([], 0.0, tl.float64) + call.lenience
                accepted = accepted | accept_near_maximum(row, x, chosen, v, lenience, PROBS)
            accept_prob = tl.where(x >= 0, accepted.to(tl.float64), accept_prob)
        elif valid:
            if STATS == GUMBEL:
                chosen = gumbel_argmax(
                    stats, maximum, listed, ids, params.inv_t, FILTERS, TILE, BLOCK
                )
                accepted = chosen == x
                accept_prob = tl.where(x >= 0, accepted.to(tl.float64), accept_prob)
                logprob = log_probability(
                    row, chosen, v, params.direct, params.temperature, maximum, log_sum, threshold,
                    PROBS,
                )  # fmt: skip
            elif STATS == MASSES:
                logprob = log_probability(
                    row, x, v, params.direct, params.temperature, maximum, log_sum, threshold,
                    PROBS,
                )  # fmt: skip
                q_x, log_q_x, q_maximum, q_log_sum, q_threshold, mode = draft_summary(
                    draft, call, scratch, b, i, begin, index, x, v, params, draft_temperature,
                    DRAFT, BLOCK, LOG_TILES,
                )  # fmt: skip
                if mode != KEEP:
                    if RULE == LENIENT:
                        lenience = tl.full([], 0.0, tl.float64) + call.lenience
                        q_x *= lenience
                        log_q_x += tl.log(lenience)
                    accept_prob = ratio(p_x, q_x, logprob, log_q_x, params.direct, PROBS, DRAFT)
                    if RULE != BLOCK_RULE:
                        u = row_uniform(call, b, i, i, ACCEPT)
                        accepted = (logprob > LOG_OF_ZERO) & (log64(u) < logprob - log_q_x)
                        if PROBS and DRAFT != SAMPLED:
                            accepted = tl.where(params.direct, u * q_x < p_x, accepted)
                        accept_prob = tl.minimum(accept_prob, 1.0)
    out = scratch.summaries + index * FIELDS
    tl.store(out + VALID, valid.to(tl.float64))
    tl.store(out + ACCEPTED, accepted.to(tl.float64))
    tl.store(out + ACCEPT_PROB, accept_prob)
    tl.store(out + LOGPROB, logprob)
    tl.store(out + CHOSEN, chosen.to(tl.float64))
    tl.store(out + MAXIMUM, maximum.to(tl.float64))
    tl.store(out + THRESHOLD, threshold.to(tl.float64))
    tl.store(out + LOG_SUM, log_sum)
    tl.store(out + MODE, mode.to(tl.float64))
    tl.store(out + DRAFT_MAXIMUM, q_maximum.to(tl.float64))
    tl.store(out + DRAFT_LOG_SUM, q_log_sum)
    tl.store(out + DRAFT_THRESHOLD, q_threshold.to(tl.float64))
    tl.store(out + LISTED, listed.to(tl.float64))
