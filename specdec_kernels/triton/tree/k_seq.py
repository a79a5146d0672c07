"""Rule k_seq (Sun et al. 2023): each sibling against the whole target, by one factor rho."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.chain.residual import target_tile, unsound
from specdec_kernels.triton.chain.rules import DRAFT_NOT_FINITE
from specdec_kernels.triton.row.draft import RAW, SAMPLED, SUBTRACT, draft_tile, linear_sum
from specdec_kernels.triton.row.tile import STAGES, flag, log64
from specdec_kernels.triton.tree.residual import (
    BEFORE,
    ENTRY,
    LAST,
    at,
    beyond,
    draw_left,
    entry_law,
    first_node,
    note_law,
)
from specdec_kernels.triton.tree.siblings import at_first, coin, draft_at, law_at, target_at

PASSES = tl.constexpr(24)  # over two rows, at most; four to eight are usual
# Roots are aimed at from above, by less than rho may be too large.
NEAR = tl.constexpr(2.5e-7)
CLOSE = tl.constexpr(4e-7)
WIDTH_OF_RHO = tl.constexpr(1e-6)
# Where so little is rejected, rho has no more digits than its masses.
NOTHING = tl.constexpr(1e-8)


@triton.jit
def overlap(
    p, q, drafts, mode, tokens, tiles, share_a, share_b,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Of two shares s of P: sum of min(Q, s P), and of Q where it is below s P; if Q is bad."""
    q_top = tl.full([], float("-inf"), tl.float32)
    beta_a = tl.full([], 0.0, tl.float64)
    below_a = tl.full([], 0.0, tl.float64)
    beta_b = tl.full([], 0.0, tl.float64)
    below_b = tl.full([], 0.0, tl.float64)
    for t in tl.range(0, tiles, num_stages=STAGES):
        law, _p_top = target_tile(p, t, PROBS, TILE)
        taken, top = draft_tile(q, drafts[3], t, p[1], mode, DRAFT, TILE, WIDTH)
        q_top = tl.maximum(q_top, top)
        part = law * share_a
        beta_a += linear_sum(tl.minimum(taken, part))
        below_a += linear_sum(tl.where(taken < part, taken, 0.0))
        part = law * share_b
        beta_b += linear_sum(tl.minimum(taken, part))
        below_b += linear_sum(tl.where(taken < part, taken, 0.0))
    scanned: tl.constexpr = DRAFT == RAW or DRAFT == SAMPLED  # noqa: PLR1714
    if BEYOND and scanned:  # noqa: SIM102  (compiled in only where the draft has such columns)
        if mode == SUBTRACT:
            _mass, top = beyond(q, drafts[3], p[1], tokens, tokens * 0, DRAFT, TILE, WIDTH)
            q_top = tl.maximum(q_top, top)
    return beta_a, below_a, beta_b, below_b, unsound(mode, q_top, DRAFT).to(tl.int32)


@triton.jit
def narrow(low, high, rho, share, beta, below, k):
    """The bracket after one look, and whether its upper end is close enough.

    g(rho) = 1 - (1 - beta)^K - rho * beta falls with rho, and any rho with g <= 0 is lossless. With
    S the sum of (1 - beta)^i, i < K, it is beta * (S - rho); S is also how often a token that one
    trial accepts comes out of all of them.
    """
    beta = tl.minimum(beta, 1.0)
    miss = 1.0 - beta
    times = tl.full([], 0.0, tl.float64)
    power = tl.full([], 1.0, tl.float64)
    power_before = power
    for _ in range(0, k):
        times = times * miss + 1.0
        power_before = power
        power = power * miss
    g = beta * (times - rho)
    slope = k * power_before * (beta - below) / rho + below
    low_rho, low_g, low_slope = low
    high_rho, high_g, high_share, high_times = high
    lossless = (g <= 0) | (rho >= k)
    lower = lossless & (rho <= high_rho)
    higher = (lossless == 0) & (rho >= low_rho)
    close = lower & ((-g <= CLOSE * slope) | (power < NOTHING))
    low = (
        tl.where(higher, rho, low_rho), tl.where(higher, g, low_g),
        tl.where(higher, slope, low_slope),
    )  # fmt: skip
    high = (
        tl.where(lower, rho, high_rho), tl.where(lower, tl.maximum(-g, 0.0), high_g),
        tl.where(lower, share, high_share), tl.where(lower, times, high_times),
    )  # fmt: skip
    return low, high, close.to(tl.int32)


@triton.jit
def factor(
    p, q, drafts, mode, tokens, k, tiles,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """(rho, 1 / rho as it was used, S, whether Q is bad).

    The smallest rho >= 1 with g <= 0 lies between the tangent of g at the lower end of its bracket
    and the secant, on either side; where both are slow, at kinks, the bracket is halved.
    """
    zero = tl.full([], 0.0, tl.float64)
    most = zero + k
    low = (zero + 1, zero, zero + 1)
    high = (most, zero, tl.full([], 1.0, tl.float32), most)
    a = zero + 1
    b = most
    bad = flag(0)
    passes = flag(0)
    width = most
    going = flag(1)
    while going > 0:
        share_a = (1.0 / a).to(tl.float32)
        share_b = (1.0 / b).to(tl.float32)
        beta_a, below_a, beta_b, below_b, bad = overlap(
            p, q, drafts, mode, tokens, tiles, share_a, share_b, PROBS, DRAFT, BEYOND, TILE, WIDTH
        )
        low, high, close_a = narrow(low, high, a, share_a, beta_a, below_a, k)
        low, high, close_b = narrow(low, high, b, share_b, beta_b, below_b, k)
        passes += 1
        end = low[0]
        span = high[0] - end
        middle = end + span / 2
        tangent = end + low[1] / tl.maximum(low[2], 1e-30) + NEAR
        secant = end + span * low[1] / tl.maximum(low[1] + high[1], 1e-30) + NEAR
        slow = (passes > 1) & (span > width / 4)
        a = tl.where(slow & (tangent > middle) & (secant >= middle), middle, tangent)
        b = tl.where(slow & (secant < middle), middle, secant)
        a = tl.where((a > end) & (a < high[0]), a, middle)
        b = tl.where((b > end) & (b < high[0]), b, middle)
        width = span
        done = (bad > 0) | (close_a > 0) | (close_b > 0) | (span <= WIDTH_OF_RHO)
        going = ((done == 0) & (passes < PASSES)).to(tl.int32)
    return high[0], high[2], high[3], bad


@triton.jit
def k_seq(
    p, law, children, depth, tree, drafts, mode, shaping, noise, scratch, entries, accept_probs,
    tiles, d_tiles,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """-> (the child that stands or -1, the token, status). All are of the law of the first."""
    tokens, _, laws, nodes = tree
    one = tl.full([], 1.0, tl.float32)
    index = tl.arange(0, tokens.shape[0])
    k = tl.sum(children, 0)
    node = flag(-1)
    token = tl.full([], -1, tl.int64)
    flags = flag(0)
    count = flag(0)
    n = first_node(children)
    if k > 0:
        certain = at(tokens, n)
        draft = at(laws, n)
        _q_x, _log_q_x, q_logsumexp, q_threshold, sound = law_at(
            drafts, draft, certain, mode, entries, n, count, shaping, scratch, d_tiles, DRAFT, TILE,
            CHUNK, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        share = one
        rho = tl.full([], 1.0, tl.float64)
        times = rho
        if sound > 0:
            note_law(entries, n, certain, draft, draft.to(tl.float64), q_logsumexp, q_threshold)
            q, _before, _last, _next = entry_law(entries, n, drafts)
            rho, share, times, bad = factor(
                p, q, drafts, mode, tokens, k, tiles, PROBS, DRAFT, BEYOND, TILE, WIDTH
            )
            sound = 1 - bad
        if sound == 0:
            flags = flag(DRAFT_NOT_FINITE)
        else:
            remaining = children
            lane = flag(0)
            work = flag(1)
            while work > 0:
                m = first_node(remaining)
                x = at(tokens, m)
                q_x, log_q_x, _sound = draft_at(
                    drafts, draft, x, certain, mode, shaping, q_logsumexp, q_threshold, DRAFT, WIDTH
                )
                p_x, logprob = target_at(p, x, law[2], shaping[0], PROBS)
                hit, chance = at_first(
                    coin(noise, m, depth, lane), p_x, rho * q_x, logprob, log_q_x + log64(rho),
                    p[2], PROBS, DRAFT,
                )  # fmt: skip
                if accept_probs is not None:
                    tl.store(accept_probs + m, chance.to(tl.float32))
                remaining = tl.where(index == m, 0, remaining)
                lane += 1
                work = tl.max(remaining, 0)
                if hit:
                    node = m
                    token = x
                    work = flag(0)
            if node < 0:
                count = flag(1)
                tl.store(entries + n * ENTRY + BEFORE, share.to(tl.float64))
                tl.store(entries + n * ENTRY + LAST, times)
                tl.debug_barrier()
    if node < 0:
        token, _count, _mass, more = draw_left(
            p, (entries, n, count, one, mode, children), drafts, tokens, n,
            tl.full([], 0.0, tl.float64), flag(0), law, tiles, scratch, noise, depth, nodes, RULE,
            PROBS, DRAFT, TILE, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        flags |= more
    return node, token, flags
