"""The rules that decide draft by draft, from the first one on: all but rule block."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..row.distribution import (
    GUMBEL,
    MASSES,
    RowStats,
    gumbel_argmax,
    row_stats,
    weight_params,
)
from ..row.draft import (
    KEEP,
    ONE_HOT,
    SAMPLED,
    DraftDistribution,
    draft_entry,
    draft_row,
)
from ..row.noise import ACCEPT, RESIDUAL, SHARED
from ..row.status import DRAFT_INVALID, TARGET_INVALID
from ..row.tile import (
    INF,
    finite,
    flag,
    inverse,
    log64,
    log_probability,
    row_argmax,
    stats_at,
)
from .residual import recovered_or_bonus
from .rules import (
    BLOCK_RULE,
    LENIENT,
    TOKEN,
    accept_at_temperature_0,
    accept_by_target,
)
from .sequence import TargetDistribution, row_uniform


class ChainScratch(NamedTuple):
    """The scratch of a launch, and where this sequence's tile statistics are in it."""

    maxima: Any
    sums: Any
    size: Any  # entries that the statistics of one row take
    tiles: Any
    d_tiles: Any
    target: Any  # index of the first target row
    draft: Any  # from a target row to its draft row
    residual: Any


class ChainOutputs(NamedTuple):
    """The outputs of one sequence."""

    tokens: Any
    logprobs: Any  # may be None
    accept_probs: Any  # may be None


@triton.jit
def ratio(p_x, q_x, logprob, log_q_x, direct, PROBS: tl.constexpr, DRAFT: tl.constexpr):
    """P(x) / Q(x), float64; 0 where P(x) is 0, whatever Q(x)."""
    out = tl.where(logprob > -INF, tl.exp(logprob - log_q_x), 0.0)
    if PROBS and DRAFT != SAMPLED:
        # Both probabilities were given: their logarithms would add rounding errors.
        quotient = tl.where(q_x > 0, p_x / tl.where(q_x > 0, q_x, 1.0), INF)
        out = tl.where(direct, tl.where(p_x > 0, quotient, 0.0), out)
    return out


@triton.jit
def target_row(
    row, x, v, stats, params, noise, i, STATS: tl.constexpr, ROW_PARALLEL: tl.constexpr,
    FILTERS: tl.constexpr, PROBS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """(P(x) of a direct row, RowStats, whether the row is valid).

    Only the drafted token of a direct row is read here; other rows are scanned.
    """
    p_x = tl.full([], 0.0, tl.float64)
    maximum = tl.full([], float("-inf"), tl.float32)
    threshold = tl.full([], float("-inf"), tl.float32)
    logsumexp = tl.full([], 0.0, tl.float64)
    if params.direct:
        p_x = tl.load(row + x, mask=(x >= 0) & (x < v), other=0).to(tl.float64)
        valid = (p_x >= 0) & (p_x < INF)
    else:
        own = row_stats(
            row, v, stats, params, noise.seed, noise.position + i, SHARED, STATS, ROW_PARALLEL,
            FILTERS, PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
        )  # fmt: skip
        maximum = own.maximum
        threshold = own.threshold
        logsumexp = own.logsumexp
        valid = finite(maximum)
    return p_x, RowStats(maximum, threshold, logsumexp), valid.to(tl.int32)


@triton.jit
def distributions(
    row, v, params, p_stats, drafts, i, x, q_threshold, q_logsumexp, DRAFT: tl.constexpr,
    RAGGED_DRAFT: tl.constexpr,
):  # fmt: skip
    """(P, Q) of row i as the residual takes them."""
    weights = weight_params(p_stats.threshold, p_stats.logsumexp, params.temperature, params.inv_t)
    p = TargetDistribution(row, v, params.direct, weights)
    if DRAFT == ONE_HOT:
        q = DraftDistribution(row, i, drafts.d, x, weights)
    else:
        q_row, first_id, _there = draft_row(drafts, i, RAGGED_DRAFT)
        draft_temperature = drafts.temperature
        q_weights = weight_params(
            q_threshold, q_logsumexp, draft_temperature, inverse(draft_temperature)
        )
        q = DraftDistribution(q_row, first_id, drafts.d, x, q_weights)
    return p, q


@triton.jit
def accept_ratio(
    u, p_x, q_x, logprob, log_q_x, direct, lenience, RULE: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr,
):  # fmt: skip
    """Rules token and lenient: accept if u * lenience * Q(x) < P(x).

    -> (whether it is accepted, the acceptance probability).
    """
    if RULE == LENIENT:
        q_x = lenience * q_x
        log_q_x += tl.log(lenience)
    accepted = log64(u) < logprob - log_q_x
    if PROBS and DRAFT != SAMPLED:
        accepted = tl.where(direct, u * q_x < p_x, accepted)
    return accepted, tl.minimum(1.0, ratio(p_x, q_x, logprob, log_q_x, direct, PROBS, DRAFT))


@triton.jit
def decide(
    rows, draft_token_ids, count, no_bonus, status_after_drafts, drafts, params, noise, scratch,
    rule_params, out, gamma, v,
    RULE: tl.constexpr, STATS: tl.constexpr, ROW_PARALLEL: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Verify one sequence -> (accepted drafts, emitted tokens, status)."""
    temperature = params.temperature
    inv_t = params.inv_t
    flags = tl.full([], 0, tl.int32)
    num_accepted = tl.full([], 0, tl.int32)
    i = tl.full([], 0, tl.int64)
    going = ((count > 0) | (no_bonus == 0)).to(tl.int32)
    while going > 0:
        x = tl.load(draft_token_ids + i, mask=i < count, other=-1).to(tl.int64)
        row = rows.first + i * rows.stride
        index = (scratch.target + i) if ROW_PARALLEL else scratch.target
        stats = stats_at(scratch, index, scratch.tiles)
        p_x, p_stats, valid = target_row(
            row, x, v, stats, params, noise, i, STATS, ROW_PARALLEL, FILTERS, PROBS, TILE, CHUNK,
            BLOCK, LOG_TILES,
        )  # fmt: skip
        flags |= tl.where(valid > 0, 0, TARGET_INVALID).to(tl.int32)
        flags |= tl.where(i < count, 0, status_after_drafts)

        token = tl.full([], -1, tl.int64)
        logprob = tl.full([], 0.0, tl.float64)
        accept_prob = tl.full([], float("nan"), tl.float64)
        accepted = tl.full([], 0, tl.int32)
        if (valid > 0) & (temperature == 0):
            token = row_argmax(row, v, stats, p_stats.maximum, PROBS, TILE, BLOCK).to(tl.int64)
            hit, accept_prob = accept_at_temperature_0(
                rule_params, noise, i, x, token, row, v, stats, p_stats.maximum, RULE, PROBS, TILE
            )
            token = tl.where(hit, x, token)
            accepted = hit.to(tl.int32)
        elif valid > 0:
            if STATS == GUMBEL:
                token = gumbel_argmax(stats, inv_t, TILE, BLOCK).to(tl.int64)
                accepted = (token == x).to(tl.int32)
                accept_prob = tl.where(x >= 0, accepted.to(tl.float64), accept_prob)
                logprob = log_probability(
                    row, token, token >= 0, params.direct, temperature, p_stats.logsumexp,
                    p_stats.threshold, PROBS,
                )  # fmt: skip
            elif STATS == MASSES and RULE != BLOCK_RULE:  # block comes here at temperature 0 only
                logprob = log_probability(
                    row, x, (x >= 0) & (x < v), params.direct, temperature, p_stats.logsumexp,
                    p_stats.threshold, PROBS,
                )  # fmt: skip
                mode = flag(KEEP)
                q_threshold = p_stats.threshold
                q_logsumexp = p_stats.logsumexp
                faults = tl.full([], 0, tl.int32)
                if RULE == TOKEN or RULE == LENIENT:  # noqa: PLR1714, SIM109  (no `in`)
                    q_x, log_q_x, q_logsumexp, q_threshold, mode = draft_entry(
                        drafts, i, x, params,
                        stats_at(scratch, scratch.draft + index, scratch.d_tiles), DRAFT,
                        RAGGED_DRAFT, ROW_PARALLEL, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
                    )  # fmt: skip
                    if mode != KEEP:
                        hit, accept_prob = accept_ratio(
                            row_uniform(noise, i, i, ACCEPT), p_x, q_x, logprob, log_q_x,
                            params.direct, rule_params.lenience, RULE, PROBS, DRAFT,
                        )  # fmt: skip
                        accepted = hit.to(tl.int32)
                    elif x >= 0:
                        faults = flag(DRAFT_INVALID)
                elif x >= 0:
                    hit, accept_prob = accept_by_target(
                        rule_params, noise, i, x, logprob, row, v, stats, p_stats, inv_t, RULE,
                        PROBS, TILE, BLOCK, LOG_TILES,
                    )  # fmt: skip
                    accepted = hit.to(tl.int32)
                token = x
                if accepted == 0:
                    p, q = distributions(
                        row, v, params, p_stats, drafts, i, x, q_threshold, q_logsumexp, DRAFT,
                        RAGGED_DRAFT,
                    )  # fmt: skip
                    token, logprob, more = recovered_or_bonus(
                        p, q, drafts, mode, tl.full([], 1.0, tl.float32),
                        rule_params.lenience.to(tl.float32), tl.full([], 0, tl.int32), p_stats,
                        params, stats, stats_at(scratch, scratch.residual, scratch.tiles),
                        row_uniform(noise, i, gamma, RESIDUAL), RULE, ROW_PARALLEL, FILTERS, PROBS,
                        DRAFT, BEYOND, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
                    )  # fmt: skip
                    flags |= more | tl.where(token >= 0, faults, 0)
        tl.store(out.tokens + i, token.to(out.tokens.dtype.element_ty))
        if out.logprobs is not None:
            tl.store(out.logprobs + i, logprob.to(tl.float32))
        if out.accept_probs is not None:
            tl.store(out.accept_probs + i, accept_prob.to(tl.float32), mask=i < gamma)
        num_accepted += accepted
        i += 1
        going = accepted * ((i < count) | (no_bonus == 0)).to(tl.int32)
    return num_accepted, i.to(tl.int32), flags
