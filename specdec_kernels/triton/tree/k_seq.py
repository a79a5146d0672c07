"""Rule k_seq (SpecTr, Sun et al. 2023): each sibling against the whole P, damped by a factor rho.

A sibling x is accepted with probability min(P(x) / (rho * Q(x)), 1). With K siblings and

    beta(rho) = sum of min(Q, P / rho)
    g(rho) = 1 - (1 - beta)^K - rho * beta

the rule is lossless for every rho with g(rho) <= 0, and it accepts most at the smallest of them.
docs/rules.md#k_seq has the derivation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..chain.residual import invalid_draft, target_tile
from ..row.draft import (
    DRAFT_PROBS,
    SAMPLED,
    SUBTRACT,
    draft_tile,
    linear_sum,
)
from ..row.status import DRAFT_INVALID
from ..row.tile import STAGES, flag, log64
from .residual import (
    BEFORE,
    ENTRY,
    LAST,
    NodeResidual,
    beyond_target,
    draw_residual,
    element,
    first_node,
    save_draft_row,
    saved_draft,
)
from .siblings import (
    accept_against_target,
    measure_draft,
    node_draft_probability,
    target_probability,
    trial_uniform,
)

PASSES = tl.constexpr(24)  # over both rows, at most; four to eight are usual
# The search aims a little above the root, by less than rho may be too large.
NEAR = tl.constexpr(2.5e-7)
CLOSE = tl.constexpr(4e-7)
WIDTH_OF_RHO = tl.constexpr(1e-6)
# If all trials are rejected more rarely than this, rho cannot be known more accurately.
NOTHING = tl.constexpr(1e-8)


class Low(NamedTuple):
    """The lower end of the bracket of rho, where g > 0."""

    rho: Any
    g: Any
    slope: Any  # -dg / drho


class High(NamedTuple):
    """The upper end of the bracket of rho, where g <= 0."""

    rho: Any
    g: Any  # -g
    p_scale: Any  # 1 / rho in float32, as the tiles used it
    times: Any  # S, see `narrow`


@triton.jit
def overlap(
    p, q, drafts, mode, tokens, tiles, scale_a, scale_b,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """For two scales s of P: the sum of min(Q, s P) and that of Q where Q < s P.

    -> (both sums of scale a, both of scale b, whether Q's row is invalid)
    """
    q_max = tl.full([], float("-inf"), tl.float32)
    beta_a = tl.full([], 0.0, tl.float64)
    below_a = tl.full([], 0.0, tl.float64)
    beta_b = tl.full([], 0.0, tl.float64)
    below_b = tl.full([], 0.0, tl.float64)
    for t in tl.range(0, tiles, num_stages=STAGES):
        p_probs, _p_max = target_tile(p, t, PROBS, TILE)
        q_probs, tile_max = draft_tile(q, drafts, t, p.v, mode, DRAFT, TILE, WIDTH)
        q_max = tl.maximum(q_max, tile_max)
        scaled = p_probs * scale_a
        beta_a += linear_sum(tl.minimum(q_probs, scaled))
        below_a += linear_sum(tl.where(q_probs < scaled, q_probs, 0.0))
        scaled = p_probs * scale_b
        beta_b += linear_sum(tl.minimum(q_probs, scaled))
        below_b += linear_sum(tl.where(q_probs < scaled, q_probs, 0.0))
    scanned: tl.constexpr = DRAFT == DRAFT_PROBS or DRAFT == SAMPLED  # noqa: PLR1714
    if BEYOND and scanned:  # noqa: SIM102  (compiled in only where the draft has such columns)
        if mode == SUBTRACT:
            _mass, maximum = beyond_target(q, drafts, p.v, tokens, tokens * 0, DRAFT, TILE, WIDTH)
            q_max = tl.maximum(q_max, maximum)
    return beta_a, below_a, beta_b, below_b, invalid_draft(mode, q_max, DRAFT).to(tl.int32)


@triton.jit
def narrow(low, high, rho, p_scale, beta, below, k):
    """Narrow the bracket by one evaluation -> (low, high, whether high is close enough).

    With S the sum of (1 - beta)^i for i < K, g(rho) = beta * (S - rho). S is also the expected
    number of times that a token accepted in one trial comes out of all of them.
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
    lossless = (g <= 0) | (rho >= k)
    lower = lossless & (rho <= high.rho)
    higher = (lossless == 0) & (rho >= low.rho)
    close = lower & ((-g <= CLOSE * slope) | (power < NOTHING))
    new_low = Low(
        tl.where(higher, rho, low.rho), tl.where(higher, g, low.g),
        tl.where(higher, slope, low.slope),
    )  # fmt: skip
    new_high = High(
        tl.where(lower, rho, high.rho), tl.where(lower, tl.maximum(-g, 0.0), high.g),
        tl.where(lower, p_scale, high.p_scale), tl.where(lower, times, high.times),
    )  # fmt: skip
    return new_low, new_high, close.to(tl.int32)


@triton.jit
def factor(
    p, q, drafts, mode, tokens, k, tiles,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Find the smallest rho >= 1 with g <= 0 -> (High of it, whether Q's row is invalid).

    The root lies between the tangent of g at the lower end of the bracket and the secant. Each pass
    evaluates g at both. Where both converge slowly, at kinks of g, the bracket is halved.
    """
    zero = tl.full([], 0.0, tl.float64)
    most = zero + k
    low = Low(zero + 1, zero, zero + 1)
    high = High(most, zero, tl.full([], 1.0, tl.float32), most)
    a = zero + 1
    b = most
    bad = flag(0)
    passes = flag(0)
    width = most
    going = flag(1)
    while going > 0:
        scale_a = (1.0 / a).to(tl.float32)
        scale_b = (1.0 / b).to(tl.float32)
        beta_a, below_a, beta_b, below_b, bad = overlap(
            p, q, drafts, mode, tokens, tiles, scale_a, scale_b, PROBS, DRAFT, BEYOND, TILE, WIDTH
        )
        low, high, close_a = narrow(low, high, a, scale_a, beta_a, below_a, k)
        low, high, close_b = narrow(low, high, b, scale_b, beta_b, below_b, k)
        passes += 1
        end = low.rho
        bracket = high.rho - end
        middle = end + bracket / 2
        tangent = end + low.g / tl.maximum(low.slope, 1e-30) + NEAR
        secant = end + bracket * low.g / tl.maximum(low.g + high.g, 1e-30) + NEAR
        slow = (passes > 1) & (bracket > width / 4)
        a = tl.where(slow & (tangent > middle) & (secant >= middle), middle, tangent)
        b = tl.where(slow & (secant < middle), middle, secant)
        a = tl.where((a > end) & (a < high.rho), a, middle)
        b = tl.where((b > end) & (b < high.rho), b, middle)
        width = bracket
        done = (bad > 0) | (close_a > 0) | (close_b > 0) | (bracket <= WIDTH_OF_RHO)
        going = ((done == 0) & (passes < PASSES)).to(tl.int32)
    return high, bad


@triton.jit
def k_seq(
    p, p_stats, children, depth, tree, drafts, mode, params, noise, scratch, accept_probs,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """-> (the accepted child or -1, the token, status). All children use the first one's Q."""
    tokens = tree.tokens
    entries = scratch.entries
    one = tl.full([], 1.0, tl.float32)
    index = tl.arange(0, tokens.shape[0])
    k = tl.sum(children, 0)
    node = flag(-1)
    token = tl.full([], -1, tl.int64)
    flags = flag(0)
    count = flag(0)
    n = first_node(children)
    if k > 0:
        first_token = element(tokens, n)
        draft = element(tree.draft_rows, n)
        _q_x, _log_q_x, q_logsumexp, q_threshold, valid = measure_draft(
            drafts, draft, first_token, mode, n, count, params, scratch, DRAFT, TILE, CHUNK, BLOCK,
            LOG_TILES, WIDTH,
        )  # fmt: skip
        p_scale = one
        rho = tl.full([], 1.0, tl.float64)
        times = rho
        if valid > 0:
            save_draft_row(
                entries, n, first_token, draft, draft.to(tl.float64), q_logsumexp, q_threshold
            )
            q, _before, _last, _following = saved_draft(entries, n, drafts)
            found, bad = factor(
                p, q, drafts, mode, tokens, k, scratch.tiles, PROBS, DRAFT, BEYOND, TILE, WIDTH
            )
            rho = found.rho
            p_scale = found.p_scale
            times = found.times
            valid = 1 - bad
        if valid == 0:
            flags = flag(DRAFT_INVALID)
        else:
            remaining = children
            trial = flag(0)
            work = flag(1)
            while work > 0:
                m = first_node(remaining)
                x = element(tokens, m)
                q_x, log_q_x, _valid = node_draft_probability(
                    drafts, draft, x, first_token, mode, params, q_logsumexp, q_threshold, DRAFT,
                    WIDTH,
                )  # fmt: skip
                p_x, logprob = target_probability(
                    p, x, p_stats.logsumexp, params.temperature, PROBS
                )
                hit, accept_prob = accept_against_target(
                    trial_uniform(noise, m, depth, trial), p_x, rho * q_x, logprob,
                    log_q_x + log64(rho), p.direct, PROBS, DRAFT,
                )  # fmt: skip
                if accept_probs is not None:
                    tl.store(accept_probs + m, accept_prob.to(tl.float32))
                remaining = tl.where(index == m, 0, remaining)
                trial += 1
                work = tl.max(remaining, 0)
                if hit:
                    node = m
                    token = x
                    work = flag(0)
            if node < 0:
                count = flag(1)
                tl.store(entries + n * ENTRY + BEFORE, p_scale.to(tl.float64))
                tl.store(entries + n * ENTRY + LAST, times)
                tl.debug_barrier()
    if node < 0:
        token, _mass, more = draw_residual(
            p, NodeResidual(n, n, count, one, mode, children), drafts, tokens,
            tl.full([], 0.0, tl.float64), flag(0), p_stats, scratch, noise, depth, tree.num_nodes,
            RULE, PROBS, DRAFT, TILE, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        flags |= more
    return node, token, flags
