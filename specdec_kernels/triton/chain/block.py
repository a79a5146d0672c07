"""Rule block (Sun et al. 2024): the last i with u_i < h_i, found from the end."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.chain.decide import laws, number, ratio, target_row
from specdec_kernels.triton.chain.residual import (
    fill_residual,
    following,
    positive,
    target_tile,
    unsound,
)
from specdec_kernels.triton.chain.rules import DRAFT_NOT_FINITE, TARGET_NOT_FINITE
from specdec_kernels.triton.row.distribution import MASS
from specdec_kernels.triton.row.draft import (
    KEEP,
    POINT,
    SAMPLED,
    SPARSE,
    draft_entry,
    linear_sum,
)
from specdec_kernels.triton.row.philox import ACCEPT, RESIDUAL, lane_uniform
from specdec_kernels.triton.row.tile import INF, STAGES, flag, log_probability

# What a position keeps between the two loops: c, and of its laws what rows need to be read again.
MARKS = tl.constexpr(4)


@triton.jit
def raw_total(p, tiles, PROBS: tl.constexpr, TILE: tl.constexpr):
    """(sum of probabilities used as they are, their top)."""
    total = tl.full([], 0.0, tl.float64)
    top = tl.full([], 0.0, tl.float32)
    for t in tl.range(0, tiles, num_stages=STAGES):
        law, tile_top = target_tile(p, t, PROBS, TILE)
        top = tl.maximum(top, tile_top)
        total += linear_sum(law)
    return total, top


@triton.jit
def sparse_law(row, ids, d, start, WIDTH: tl.constexpr):
    """(ids [WIDTH] from `start` on, Q of each, whether it did not come before)."""
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
def sparse_sides(
    p, q, ids, share, total, temp, logsumexp, PROBS: tl.constexpr, WIDTH: tl.constexpr
):
    """(S+, S-) with a sparse draft: P at its ids, and the rest of P in one piece."""
    row, v, direct, threshold, _, _, _ = p
    q_row, first_id, d = q[0], q[1], q[2]
    held = tl.full([], 0.0, tl.float64)
    more = tl.full([], 0.0, tl.float64)
    less = tl.full([], 0.0, tl.float64)
    for start in range(0, d, WIDTH):
        token, law, first = sparse_law(q_row, ids + first_id, d, start, WIDTH)
        known = first & (token < v)
        likely = tl.exp(
            log_probability(row, token, known, direct, temp, logsumexp, threshold, PROBS)
        )
        # A sum of integers has no order; a probability is at most 1.
        units = (tl.minimum(likely, 4.0) * (1 << 50)).to(tl.int64)
        held += tl.sum(units, 0).to(tl.float64) * (1.0 / (1 << 50))
        difference = (share * likely - law).to(tl.float32)
        more += linear_sum(positive(tl.where(known, difference, 0.0)))
        less += linear_sum(positive(tl.where(first, -difference, 0.0)))
    return share * tl.maximum(total - held, 0.0) + more, less


@triton.jit
def sides(
    p, q, keys, p_x, tiles, share, temp, logsumexp, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(top of the target, S+, S-) of a draft of a few tokens, without a scan of a law."""
    total = tl.full([], 1.0, tl.float64)
    top = tl.full([], 1.0, tl.float32)
    if PROBS:  # noqa: SIM102  (compiled in only where rows hold probabilities)
        if p[2]:
            total, top = raw_total(p, tiles, PROBS, TILE)
    if DRAFT == SPARSE:
        more, less = sparse_sides(p, q, keys[0], share, total, temp, logsumexp, PROBS, WIDTH)
    else:
        more = share * tl.maximum(total - p_x, 0.0) + tl.maximum(share * p_x - 1, 0.0)
        less = tl.maximum(1 - share * p_x, 0.0)
    return top, more, less


@triton.jit
def running(
    rows, draft_token_ids, count, drafts, shaping, noise, scratch, marks, logprobs, v, tiles, d_tiles,
    PRE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
    RAGGED_DRAFT: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """c of every row up to the first faulty one, into `marks` -> (that row or `count`, fault)."""
    row_0, row_stride = rows
    temp, inv_t, _, _, _, _, direct = shaping
    tops, sums, slot_0, draft_slots, slot_size, _ = scratch
    share = tl.full([], 1.0, tl.float64)
    fault = tl.full([], 0, tl.int32)
    i = tl.full([], 0, tl.int64)
    going = (count > 0).to(tl.int32)
    while going > 0:
        x = tl.load(draft_token_ids + i).to(tl.int64)
        row = row_0 + i * row_stride
        slot = (slot_0 + i) if PRE else slot_0
        p_x, _top, threshold, logsumexp, alive = target_row(
            row, x, v, tiles, tops + slot * slot_size, sums + slot * slot_size, shaping, noise, i,
            MASS, PRE, FILTERS, PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
        )  # fmt: skip
        if alive > 0:
            to = (draft_slots + slot) * slot_size
            q_x, log_q_x, q_logsumexp, _cut, mode = draft_entry(
                drafts, i, x, temp, inv_t, tops + to, sums + to, d_tiles, DRAFT, RAGGED_DRAFT, PRE,
                TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
            )  # fmt: skip
            logprob = log_probability(row, x, x < v, direct, temp, logsumexp, threshold, PROBS)
            if logprobs is not None:
                tl.store(logprobs + i, logprob.to(tl.float32))
            tl.store(marks + i * MARKS, share)
            tl.store(marks + i * MARKS + 1, logsumexp)
            tl.store(marks + i * MARKS + 2, threshold.to(tl.float64))
            tl.store(marks + i * MARKS + 3, q_logsumexp)
            step = ratio(p_x, q_x, logprob, log_q_x, direct, PROBS, DRAFT)
            if mode == KEEP:
                fault = flag(DRAFT_NOT_FINITE)
            else:
                share = tl.where((share > 0) & (step > 0), tl.minimum(share * step, 1.0), 0.0)
                i += 1
        else:
            fault = flag(TARGET_NOT_FINITE)
        going = (fault == 0).to(tl.int32) * (i < count).to(tl.int32)
    tl.store(marks + i * MARKS, share)
    tl.debug_barrier()
    return i, fault


@triton.jit
def marked_laws(
    rows, draft_token_ids, i, count, drafts, shaping, marks, v, DRAFT: tl.constexpr,
    RAGGED_DRAFT: tl.constexpr,
):  # fmt: skip
    """(p, q, what to take off P, the target's logsumexp and threshold) of a judged row."""
    temp, inv_t, _, _, _, _, direct = shaping
    thresholds, q_temp = drafts[6], drafts[7]
    x = tl.load(draft_token_ids + i, mask=i < count, other=-1).to(tl.int64)
    logsumexp = tl.load(marks + i * MARKS + 1)
    threshold = tl.load(marks + i * MARKS + 2).to(tl.float32)
    q_threshold = tl.full([], float("-inf"), tl.float32)
    mode = tl.full([], 1 if DRAFT == POINT else 2, tl.int32)  # REMOVE or SUBTRACT
    if DRAFT == SAMPLED:
        q_threshold = tl.load(thresholds + i, mask=i < count, other=0.0)
        mode = tl.where(q_temp == 0, 1, 2).to(tl.int32)
    p, q = laws(
        rows[0] + i * rows[1], v, direct, threshold, logsumexp, temp, inv_t, drafts, i, x,
        q_threshold, tl.load(marks + i * MARKS + 3), DRAFT, RAGGED_DRAFT,
    )  # fmt: skip
    return p, q, mode, logsumexp, threshold


@triton.jit
def coin_of_block(noise, i):
    """A coin of this round alone: it may have shaped what was emitted before its position."""
    seed, position, uniforms = noise
    if uniforms is None:
        u = lane_uniform(i.to(tl.uint32), seed, position, ACCEPT)
    else:
        u = tl.load(uniforms + i)
    return u


@triton.jit
def block(
    rows, draft_token_ids, count, cut, missing, drafts, shaping, noise, scratch, marks, out, gamma, v,
    tiles, d_tiles,
    RULE: tl.constexpr, PRE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The verdict on one sequence -> (how many drafts stand, rows written, status).

    A faulty row ends the block before it, as if nothing had been drafted from there on.
    """
    temp, _, _, _, _, _, direct = shaping
    tops, sums, slot_0, _, slot_size, residual_at = scratch
    tokens, logprobs, accept_probs = out
    gathered: tl.constexpr = DRAFT == POINT or DRAFT == SPARSE  # noqa: PLR1714
    one = tl.full([], 1.0, tl.float32)
    end, fault = running(
        rows, draft_token_ids, count, drafts, shaping, noise, scratch, marks, logprobs, v, tiles,
        d_tiles, PRE, FILTERS, PROBS, DRAFT, RAGGED_DRAFT, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
    )  # fmt: skip

    last = end
    tau = end
    going = tl.full([], 1, tl.int32)
    while going > 0:
        h = tl.load(marks + tau * MARKS)
        if tau < end:
            p, q, mode, logsumexp, threshold = marked_laws(
                rows, draft_token_ids, tau, count, drafts, shaping, marks, v, DRAFT, RAGGED_DRAFT
            )
            if gathered:
                p_x = tl.exp(log_probability(
                    p[0], q[3], q[3] < v, direct, temp, logsumexp, threshold, PROBS
                ))  # fmt: skip
                p_top, more, less = sides(
                    p, q, drafts[3], p_x, tiles, h, temp, logsumexp, PROBS, DRAFT, TILE, WIDTH
                )
                q_top = one
            else:
                p_top, q_top, more, less = fill_residual(
                    p, q, drafts[3], tiles, mode, h.to(tl.float32), one, tops + residual_at,
                    sums + residual_at, RULE, PROBS, DRAFT, BEYOND, TILE, WIDTH,
                )  # fmt: skip
            if direct & ((p_top == 0) | (p_top == INF)):
                end = tau
                fault = flag(TARGET_NOT_FINITE)
            elif unsound(mode, q_top, DRAFT):
                end = tau
                fault = flag(DRAFT_NOT_FINITE)
            else:
                # Nothing of Q above cP: they are one, and so c = 1; or a row is no law.
                h = tl.where(less > 0, tl.minimum(more / tl.where(less > 0, less, 1.0), 1.0), h)
        if tau == 0:
            going = tl.full([], 0, tl.int32)
        else:
            if accept_probs is not None:
                tl.store(accept_probs + tau - 1, h.to(tl.float32))
            if coin_of_block(noise, tau - 1) < h:
                going = tl.full([], 0, tl.int32)
            else:
                tau -= 1

    for i in range(0, tau.to(tl.int32)):
        tl.store(tokens + i, tl.load(draft_token_ids + i).to(tokens.dtype.element_ty))
    if accept_probs is not None:
        for i in range(0, gamma):
            if (i < tau - 1) | (i >= last):
                tl.store(accept_probs + i, float("nan"))
    flags = tl.full([], 0, tl.int32)
    written = tau.to(tl.int32)
    at_end = tau == end
    if at_end & (fault == TARGET_NOT_FINITE):
        flags = fault
    elif (at_end & (fault == 0) & (cut > 0)) == 0:
        p, q, mode, logsumexp, threshold = marked_laws(
            rows, draft_token_ids, tau, count, drafts, shaping, marks, v, DRAFT, RAGGED_DRAFT
        )
        share = tl.load(marks + tau * MARKS).to(tl.float32)
        if at_end:  # a row that was not judged has left no marks
            mode = flag(KEEP)
            share = one
            logsumexp = tl.full([], 0.0, tl.float64)
            threshold = tl.full([], float("-inf"), tl.float32)
        slot = (slot_0 + tau) if PRE else slot_0
        law_at = slot * slot_size
        token, logprob, flags = following(
            p, q, drafts[3], mode, share, one, (at_end == 0).to(tl.int32) * (0 if gathered else 1),
            (one, threshold, logsumexp), shaping, tiles, tops + law_at, sums + law_at,
            tops + residual_at, sums + residual_at, number(noise, tau, gamma, RESIDUAL), RULE, PRE,
            FILTERS, PROBS, DRAFT, BEYOND, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        flags |= tl.where(at_end, tl.where(fault > 0, fault, missing), 0)
        tl.store(tokens + tau, token.to(tokens.dtype.element_ty))
        if logprobs is not None:
            tl.debug_barrier()
            tl.store(logprobs + tau, logprob.to(tl.float32))
        written += 1
    return tau.to(tl.int32), written, flags
