"""Rule block (Sun et al. 2024): the first tau drafts are accepted, tau the last i with u_i < h_i.

A first loop goes forward over the rows and computes the scale of P at each, `p_scale` in the code:
c_0 = 1 and c_(i+1) = min(c_i * P(x_i) / Q(x_i), 1). A second loop goes back from the last draft and
computes h_i = min(positive / negative, 1), where these are the sums of the positive and of the
negative parts of c_i * P - Q, both taken as positive numbers. It stops at the first i that is
accepted. docs/rules.md#block explains the rule.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..row.distribution import MASSES, RowStats
from ..row.draft import (
    KEEP,
    ONE_HOT,
    REMOVE,
    SAMPLED,
    SPARSE,
    SUBTRACT,
    draft_entry,
    linear_sum,
)
from ..row.noise import ACCEPT, RESIDUAL, counter_uniform
from ..row.status import DRAFT_INVALID, TARGET_INVALID
from ..row.tile import INF, STAGES, flag, log_probability, stats_at
from .decide import distributions, ratio, target_row
from .residual import (
    fill_residual,
    invalid_draft,
    positive,
    recovered_or_bonus,
    target_tile,
)
from .sequence import row_uniform

# The float64 numbers that a row keeps between the two loops.
P_SCALE = tl.constexpr(0)
LOGSUMEXP = tl.constexpr(1)
THRESHOLD = tl.constexpr(2)
DRAFT_LOGSUMEXP = tl.constexpr(3)
SAVED = tl.constexpr(4)


@triton.jit
def probs_total(p, tiles, PROBS: tl.constexpr, TILE: tl.constexpr):
    """(sum, maximum) of a row of probabilities that are used as they are."""
    total = tl.full([], 0.0, tl.float64)
    maximum = tl.full([], 0.0, tl.float32)
    for t in tl.range(0, tiles, num_stages=STAGES):
        probs, tile_max = target_tile(p, t, PROBS, TILE)
        maximum = tl.maximum(maximum, tile_max)
        total += linear_sum(probs)
    return total, maximum


@triton.jit
def sparse_entries(row, ids, d, start, WIDTH: tl.constexpr):
    """(ids [WIDTH] from `start` on, Q of each, whether this is its first occurrence)."""
    index = start + tl.arange(0, WIDTH)
    token = tl.load(ids + index, mask=index < d, other=-1).to(tl.int64)
    q = tl.zeros([WIDTH], tl.float64)
    first = token >= 0
    for j in range(0, d):
        same = token == tl.load(ids + j).to(tl.int64)
        q += tl.where(same, tl.load(row + j).to(tl.float64), 0.0)
        first = first & ((same == 0) | (index <= j))
    return token, q, first


@triton.jit
def sparse_residual_sums(
    p, q, ids, p_scale, total, temperature, p_logsumexp, PROBS: tl.constexpr, WIDTH: tl.constexpr
):
    """(positive sum, negative sum) with a sparse draft.

    P is read at the draft's ids. Elsewhere Q is 0, so the mass of P there is added in one term.
    """
    at_ids = tl.full([], 0.0, tl.float64)
    positive_sum = tl.full([], 0.0, tl.float64)
    negative_sum = tl.full([], 0.0, tl.float64)
    for start in range(0, q.d, WIDTH):
        token, q_probs, first = sparse_entries(q.row, ids + q.first_id, q.d, start, WIDTH)
        known = first & (token < p.v)
        p_probs = tl.exp(
            log_probability(
                p.row, token, known, p.direct, temperature, p_logsumexp, p.weights.threshold, PROBS
            )
        )
        # A sum of integers has no order; a probability is at most 1.
        units = (tl.minimum(p_probs, 4.0) * (1 << 50)).to(tl.int64)
        at_ids += tl.sum(units, 0).to(tl.float64) * (1.0 / (1 << 50))
        difference = (p_scale * p_probs - q_probs).to(tl.float32)
        positive_sum += linear_sum(positive(tl.where(known, difference, 0.0)))
        negative_sum += linear_sum(positive(tl.where(first, -difference, 0.0)))
    return p_scale * tl.maximum(total - at_ids, 0.0) + positive_sum, negative_sum


@triton.jit
def residual_sums(
    p, q, drafts, p_x, tiles, p_scale, temperature, p_logsumexp, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(maximum of P's row, positive sum, negative sum) with a one-hot or sparse draft.

    Only a direct row is scanned, because its sum is not known to be 1.
    """
    total = tl.full([], 1.0, tl.float64)
    maximum = tl.full([], 1.0, tl.float32)
    if PROBS:  # noqa: SIM102  (compiled in only where rows hold probabilities)
        if p.direct:
            total, maximum = probs_total(p, tiles, PROBS, TILE)
    if DRAFT == SPARSE:
        positive_sum, negative_sum = sparse_residual_sums(
            p, q, drafts.ids, p_scale, total, temperature, p_logsumexp, PROBS, WIDTH
        )
    else:
        positive_sum = p_scale * tl.maximum(total - p_x, 0.0) + tl.maximum(p_scale * p_x - 1, 0.0)
        negative_sum = tl.maximum(1 - p_scale * p_x, 0.0)
    return maximum, positive_sum, negative_sum


@triton.jit
def prefix_scales(
    rows, draft_token_ids, count, drafts, params, noise, scratch, saved, logprobs, v,
    ROW_PARALLEL: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
    RAGGED_DRAFT: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Save the scale of P at every row up to the first invalid one -> (that row or `count`, fault).

    The statistics of the rows are saved with it, so that the second loop need not compute them.
    """
    temperature = params.temperature
    p_scale = tl.full([], 1.0, tl.float64)
    fault = tl.full([], 0, tl.int32)
    i = tl.full([], 0, tl.int64)
    going = (count > 0).to(tl.int32)
    while going > 0:
        x = tl.load(draft_token_ids + i).to(tl.int64)
        row = rows.first + i * rows.stride
        index = (scratch.target + i) if ROW_PARALLEL else scratch.target
        p_x, p_stats, valid = target_row(
            row, x, v, stats_at(scratch, index, scratch.tiles), params, noise, i, MASSES,
            ROW_PARALLEL, FILTERS, PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
        )  # fmt: skip
        if valid > 0:
            q_x, log_q_x, q_logsumexp, _q_threshold, mode = draft_entry(
                drafts, i, x, params, stats_at(scratch, scratch.draft + index, scratch.d_tiles),
                DRAFT, RAGGED_DRAFT, ROW_PARALLEL, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
            )  # fmt: skip
            logprob = log_probability(
                row, x, x < v, params.direct, temperature, p_stats.logsumexp, p_stats.threshold,
                PROBS,
            )  # fmt: skip
            if logprobs is not None:
                tl.store(logprobs + i, logprob.to(tl.float32))
            tl.store(saved + i * SAVED + P_SCALE, p_scale)
            tl.store(saved + i * SAVED + LOGSUMEXP, p_stats.logsumexp)
            tl.store(saved + i * SAVED + THRESHOLD, p_stats.threshold.to(tl.float64))
            tl.store(saved + i * SAVED + DRAFT_LOGSUMEXP, q_logsumexp)
            step = ratio(p_x, q_x, logprob, log_q_x, params.direct, PROBS, DRAFT)
            if mode == KEEP:
                fault = flag(DRAFT_INVALID)
            else:
                kept = (p_scale > 0) & (step > 0)
                p_scale = tl.where(kept, tl.minimum(p_scale * step, 1.0), 0.0)
                i += 1
        else:
            fault = flag(TARGET_INVALID)
        going = (fault == 0).to(tl.int32) * (i < count).to(tl.int32)
    tl.store(saved + i * SAVED + P_SCALE, p_scale)
    tl.debug_barrier()
    return i, fault


@triton.jit
def saved_distributions(
    rows, draft_token_ids, i, count, drafts, params, saved, v, DRAFT: tl.constexpr,
    RAGGED_DRAFT: tl.constexpr,
):  # fmt: skip
    """(P, Q, mode, P's logsumexp and threshold) of a row that the first loop has seen."""
    x = tl.load(draft_token_ids + i, mask=i < count, other=-1).to(tl.int64)
    logsumexp = tl.load(saved + i * SAVED + LOGSUMEXP)
    threshold = tl.load(saved + i * SAVED + THRESHOLD).to(tl.float32)
    q_threshold = tl.full([], float("-inf"), tl.float32)
    mode = flag(REMOVE) if DRAFT == ONE_HOT else flag(SUBTRACT)
    if DRAFT == SAMPLED:
        q_threshold = tl.load(drafts.threshold + i, mask=i < count, other=0.0)
        mode = tl.where(drafts.temperature == 0, REMOVE, SUBTRACT).to(tl.int32)
    p, q = distributions(
        rows.first + i * rows.stride, v, params, RowStats(threshold, threshold, logsumexp), drafts,
        i, x, q_threshold, tl.load(saved + i * SAVED + DRAFT_LOGSUMEXP), DRAFT, RAGGED_DRAFT,
    )  # fmt: skip
    return p, q, mode, logsumexp, threshold


@triton.jit
def round_uniform(noise, i):
    """The acceptance uniform of draft or node i under a rule that looks ahead.

    It belongs to the round and not to the draft's own position; see docs/rules.md#noise.
    """
    if noise.uniforms is None:
        u = counter_uniform(i.to(tl.uint32), noise.seed, noise.position, ACCEPT)
    else:
        u = tl.load(noise.uniforms + i)
    return u


@triton.jit
def decide_block(
    rows, draft_token_ids, count, no_bonus, status_after_drafts, drafts, params, noise, scratch,
    saved, out, gamma, v,
    RULE: tl.constexpr, ROW_PARALLEL: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Verify one sequence -> (accepted drafts, rows written, status).

    An invalid row ends the block before it, as if nothing had been drafted from there on.
    """
    temperature = params.temperature
    lists_tokens: tl.constexpr = DRAFT == ONE_HOT or DRAFT == SPARSE  # noqa: PLR1714
    residual = stats_at(scratch, scratch.residual, scratch.tiles)
    one = tl.full([], 1.0, tl.float32)
    end, fault = prefix_scales(
        rows, draft_token_ids, count, drafts, params, noise, scratch, saved, out.logprobs, v,
        ROW_PARALLEL, FILTERS, PROBS, DRAFT, RAGGED_DRAFT, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
    )  # fmt: skip

    num_seen = end
    tau = end
    going = tl.full([], 1, tl.int32)
    while going > 0:
        h = tl.load(saved + tau * SAVED + P_SCALE)
        if tau < end:
            p, q, mode, logsumexp, threshold = saved_distributions(
                rows, draft_token_ids, tau, count, drafts, params, saved, v, DRAFT, RAGGED_DRAFT
            )
            if lists_tokens:
                p_x = tl.exp(log_probability(
                    p.row, q.token, q.token < v, params.direct, temperature, logsumexp, threshold,
                    PROBS,
                ))  # fmt: skip
                p_max, positive_sum, negative_sum = residual_sums(
                    p, q, drafts, p_x, scratch.tiles, h, temperature, logsumexp, PROBS, DRAFT,
                    TILE, WIDTH,
                )  # fmt: skip
                q_max = one
            else:
                p_max, q_max, positive_sum, negative_sum = fill_residual(
                    p, q, drafts, mode, h.to(tl.float32), one, residual, RULE, PROBS, DRAFT,
                    BEYOND, TILE, WIDTH,
                )  # fmt: skip
            if params.direct & ((p_max == 0) | (p_max == INF)):
                end = tau
                fault = flag(TARGET_INVALID)
            elif invalid_draft(mode, q_max, DRAFT):
                end = tau
                fault = flag(DRAFT_INVALID)
            else:
                # If Q <= c * P everywhere, the negative sum is 0. Then c = 1 and P = Q, and h is c.
                some = negative_sum > 0
                quotient = positive_sum / tl.where(some, negative_sum, 1.0)
                h = tl.where(some, tl.minimum(quotient, 1.0), h)
        if tau == 0:
            going = tl.full([], 0, tl.int32)
        else:
            if out.accept_probs is not None:
                tl.store(out.accept_probs + tau - 1, h.to(tl.float32))
            if round_uniform(noise, tau - 1) < h:
                going = tl.full([], 0, tl.int32)
            else:
                tau -= 1

    for i in range(0, tau.to(tl.int32)):
        token = tl.load(draft_token_ids + i)
        tl.store(out.tokens + i, token.to(out.tokens.dtype.element_ty))
    if out.accept_probs is not None:
        for i in range(0, gamma):
            if (i < tau - 1) | (i >= num_seen):
                tl.store(out.accept_probs + i, float("nan"))
    flags = tl.full([], 0, tl.int32)
    written = tau.to(tl.int32)
    at_end = tau == end
    if at_end & (fault == TARGET_INVALID):
        flags = fault
    elif (at_end & (fault == 0) & (no_bonus > 0)) == 0:
        p, q, mode, logsumexp, threshold = saved_distributions(
            rows, draft_token_ids, tau, count, drafts, params, saved, v, DRAFT, RAGGED_DRAFT
        )
        p_scale = tl.load(saved + tau * SAVED + P_SCALE).to(tl.float32)
        if at_end:  # nothing was saved for the row after the last draft
            mode = flag(KEEP)
            p_scale = one
            logsumexp = tl.full([], 0.0, tl.float64)
            threshold = tl.full([], float("-inf"), tl.float32)
        index = (scratch.target + tau) if ROW_PARALLEL else scratch.target
        filled = (at_end == 0).to(tl.int32) * (0 if lists_tokens else 1)
        token, logprob, flags = recovered_or_bonus(
            p, q, drafts, mode, p_scale, one, filled, RowStats(one, threshold, logsumexp), params,
            stats_at(scratch, index, scratch.tiles), residual,
            row_uniform(noise, tau, gamma, RESIDUAL), RULE, ROW_PARALLEL, FILTERS, PROBS, DRAFT,
            BEYOND, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        flags |= tl.where(at_end, tl.where(fault > 0, fault, status_after_drafts), 0)
        tl.store(out.tokens + tau, token.to(out.tokens.dtype.element_ty))
        if out.logprobs is not None:
            tl.debug_barrier()
            tl.store(out.logprobs + tau, logprob.to(tl.float32))
        written += 1
    return tau.to(tl.int32), written, flags
