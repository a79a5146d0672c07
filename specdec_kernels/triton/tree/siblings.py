"""Rules that decide about siblings by P / Q: one by one, and top-k plus one."""

from __future__ import annotations

import triton
import triton.language as tl

from ..chain.decide import accept_ratio
from ..chain.residual import invalid_draft
from ..chain.rules import TOKEN
from ..row.draft import (
    DRAFT_LOGITS,
    ONE_HOT,
    SAMPLED,
    SUBTRACT,
    draft_probability,
    draft_statistics,
    draft_tile,
    linear_sum,
)
from ..row.noise import ACCEPT, counter_uniform
from ..row.status import DRAFT_INVALID, EMPTY_RESIDUAL
from ..row.tile import INF, flag, log_probability, stats_at
from .residual import (
    DRAFT_ROW,
    DRAFT_STATS,
    ENTRY,
    FROM_BOTH,
    FROM_DRAFT,
    GROUP,
    LOGSUMEXP,
    NEXT,
    REST,
    NodeResidual,
    beyond_target,
    draw_residual,
    element,
    fill_residual,
    first_node,
    push,
    residual_at,
    save_draft_row,
    saved_draft,
    undo,
    without_tokens,
)
from .rules import LEAST_MASS, MULTI_DRAFT_WOR


@triton.jit
def trial_uniform(noise, n, depth, trial):
    """The acceptance uniform of node n: that of a trial at this depth, or the given one."""
    if noise.uniforms is None:
        u = counter_uniform(trial.to(tl.uint32), noise.seed, noise.position + depth, ACCEPT)
    else:
        u = tl.load(noise.uniforms + n)
    return u


@triton.jit
def target_probability(p, x, logsumexp, temperature, PROBS: tl.constexpr):
    """(P(x), log P(x)), float64; P(x) is 0 where the target has no such token."""
    logprob = log_probability(
        p.row, x, x < p.v, p.direct, temperature, logsumexp, p.weights.threshold, PROBS
    )
    p_x = tl.exp(logprob)
    if PROBS:  # noqa: SIM102  (compiled in only where rows hold probabilities)
        if p.direct:
            p_x = tl.load(p.row + x, mask=x < p.v, other=0).to(tl.float64)
    return p_x, logprob


@triton.jit
def measure_draft(
    drafts, draft, x, mode, tail, count, params, scratch,
    DRAFT: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(Q(x), log Q(x), logsumexp, threshold, whether the row is valid) of the drafted token x.

    The statistics of the row are not computed again if the tail's entry has them.
    """
    q_x = tl.full([], 0.0, tl.float64)
    log_q_x = tl.full([], 0.0, tl.float64)
    logsumexp = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], float("-inf"), tl.float32)
    valid = flag(1)
    if DRAFT != ONE_HOT:
        known = flag(0)
        if (DRAFT == DRAFT_LOGITS) & (count > 0):
            entry = scratch.entries + tail * ENTRY
            known = (tl.load(entry + DRAFT_ROW) == draft.to(tl.float64)).to(tl.int32)
            logsumexp = tl.load(entry + LOGSUMEXP)
        if (mode == SUBTRACT) & (known == 0):
            logsumexp, threshold, there = draft_statistics(
                drafts, draft.to(tl.int64), params, stats_at(scratch, DRAFT_STATS, scratch.d_tiles),
                DRAFT, True, False, TILE, CHUNK, BLOCK, LOG_TILES,
            )  # fmt: skip
            valid = there.to(tl.int32)
    if valid > 0:
        q_x, log_q_x, valid = node_draft_probability(
            drafts, draft, x, x, mode, params, logsumexp, threshold, DRAFT, WIDTH
        )
    return q_x, log_q_x, logsumexp, threshold, valid


@triton.jit
def node_draft_probability(
    drafts, draft, x, one_hot, mode, params, logsumexp, threshold, DRAFT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """(Q(x), log Q(x), whether Q(x) is valid); a one-hot Q has all probability at `one_hot`."""
    q_x = tl.where(x == one_hot, 1.0, 0.0).to(tl.float64)
    log_q_x = tl.where(x == one_hot, 0.0, -INF).to(tl.float64)
    valid = flag(1)
    if DRAFT != ONE_HOT:  # noqa: SIM102  (compiled in only where there are rows)
        if mode == SUBTRACT:
            q_x, log_q_x, there = draft_probability(
                drafts, draft.to(tl.int64), x, params.temperature, logsumexp, threshold, DRAFT,
                True, WIDTH,
            )  # fmt: skip
            valid = there.to(tl.int32)
            if DRAFT == DRAFT_LOGITS or DRAFT == SAMPLED:  # noqa: SIM109, PLR1714  (no `in`)
                q_x = tl.exp(log_q_x)
    return q_x, log_q_x, valid


@triton.jit
def accept_against_residual(u, p_x, q_x):
    """(whether u * Q(x) < P(x), the acceptance probability), where P may be a residual."""
    quotient = tl.where(q_x > 0, tl.minimum(p_x / tl.where(q_x > 0, q_x, 1.0), 1.0), 1.0)
    return u * q_x < p_x, tl.where(p_x > 0, quotient, 0.0)


@triton.jit
def accept_against_target(
    u, p_x, q_x, logprob, log_q_x, direct, PROBS: tl.constexpr, DRAFT: tl.constexpr
):
    """The same for the whole target, with the comparison of rule token.

    A token with P(x) = 0 is never accepted.
    """
    accepted, accept_prob = accept_ratio(
        u, p_x, q_x, logprob, log_q_x, direct, tl.full([], 1.0, tl.float32), TOKEN, PROBS, DRAFT
    )
    return accepted & (p_x > 0), tl.where(p_x > 0, accept_prob, 0.0)


@triton.jit
def rest_of_group(entries, head, count, group):
    """The mass of a group's Q off its tokens that were tried; 1 where none was."""
    rest = tl.full([], 1.0, tl.float64)
    e = head
    for _ in range(0, count):
        entry = entries + e * ENTRY
        same = tl.load(entry + GROUP) == group
        rest = tl.where(same, tl.load(entry + REST), rest)
        e = tl.load(entry + NEXT).to(tl.int32)
    return rest


@triton.jit
def one_by_one(
    p, p_stats, children, depth, tree, drafts, mode, params, noise, scratch, accept_probs,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rules multi_draft and multi_draft_wor -> (the accepted child or -1, the token, status)."""
    tokens = tree.tokens
    entries = scratch.entries
    logsumexp = p_stats.logsumexp
    temperature = params.temperature
    one = tl.full([], 1.0, tl.float32)
    index = tl.arange(0, tokens.shape[0])
    groups = tree.draft_rows.to(tl.float64)
    if RULE == MULTI_DRAFT_WOR:
        groups = groups * (tree.num_nodes + 1) + (tree.parents + 1)
    remaining = children
    tried = children * 0
    excluded = tried
    node = flag(-1)
    token = tl.full([], -1, tl.int64)
    flags = flag(0)
    trial = flag(0)
    head = flag(-1)
    tail = flag(-1)
    count = flag(0)
    filled = flag(0)
    mass = tl.full([], 1.0, tl.float64)
    work = tl.max(remaining, 0)
    while work > 0:
        n = first_node(remaining)
        x = element(tokens, n)
        draft = element(tree.draft_rows, n)
        group = element(groups, n)
        q_x, log_q_x, q_logsumexp, q_threshold, valid = measure_draft(
            drafts, draft, x, mode, tail, count, params, scratch, DRAFT, TILE, CHUNK, BLOCK,
            LOG_TILES, WIDTH,
        )  # fmt: skip
        rest = tl.full([], 1.0, tl.float64)
        if RULE == MULTI_DRAFT_WOR:
            rest = rest_of_group(entries, head, count, group)
        if valid == 0:
            flags = flag(DRAFT_INVALID)
            work = flag(0)
        elif rest > LEAST_MASS:  # otherwise this sibling cannot have been drawn, and is skipped
            u = trial_uniform(noise, n, depth, trial)
            p_x, logprob = target_probability(p, x, logsumexp, temperature, PROBS)
            if count == 0:
                hit, accept_prob = accept_against_target(
                    u, p_x, q_x, logprob, log_q_x, p.direct, PROBS, DRAFT
                )
            else:
                residual_x = residual_at(
                    p_x, x, NodeResidual(head, tail, count, one, mode, excluded), entries, drafts,
                    temperature, DRAFT, WIDTH,
                )  # fmt: skip
                hit, accept_prob = accept_against_residual(u, residual_x, mass * q_x / rest)
            if accept_probs is not None:
                tl.store(accept_probs + n, accept_prob.to(tl.float32))
            if hit:
                node = n
                token = x
                work = flag(0)
            else:
                save_draft_row(entries, n, x, draft, group, q_logsumexp, q_threshold)
                head, tail, count, shared = push(entries, head, tail, count, n, group, mass / rest)
                if RULE == MULTI_DRAFT_WOR:
                    tried = tl.where(index == n, 1, tried)
                    excluded = tried * tl.where(groups == group, FROM_BOTH, FROM_DRAFT)
                bad, residual_mass, _negative_sum, rest = fill_residual(
                    p, NodeResidual(head, tail, count, one, mode, excluded), drafts, tokens,
                    scratch, RULE, PROBS, DRAFT, BEYOND, TILE, WIDTH,
                )  # fmt: skip
                mass = residual_mass
                filled = flag(1)
                if bad > 0:
                    flags = flag(DRAFT_INVALID)
                    count = undo(entries, tail, count, shared)
                    excluded = tl.where(index == n, 0, excluded)
                    filled = flag(0)
                    work = flag(0)
                elif residual_mass == 0:
                    flags = flag(EMPTY_RESIDUAL)
                    count = flag(0)
                    excluded = children * 0
                    filled = flag(0)
                    work = flag(0)
                elif RULE == MULTI_DRAFT_WOR:
                    tl.store(entries + tail * ENTRY + REST, rest)
                    tl.debug_barrier()
        if RULE == MULTI_DRAFT_WOR:
            remaining = tl.where((tokens == x) & (groups == group), 0, remaining)
        else:
            remaining = tl.where(index == n, 0, remaining)
        trial += 1
        work = work * tl.max(remaining, 0)
    if node < 0:
        token, _mass, more = draw_residual(
            p, NodeResidual(head, tail, count, one, mode, excluded), drafts, tokens, mass, filled,
            p_stats, scratch, noise, depth, tree.num_nodes, RULE, PROBS, DRAFT, TILE, BLOCK,
            LOG_TILES, WIDTH,
        )  # fmt: skip
        flags |= more
    return node, token, flags


@triton.jit
def mass_without(
    q, drafts, mode, v, tokens, excluded, tiles,
    DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(mass of Q off the excluded tokens, whether its row is invalid)."""
    q_max = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float64)
    for t in range(0, tiles):
        q_probs, tile_max = draft_tile(q, drafts, t, v, mode, DRAFT, TILE, WIDTH)
        q_max = tl.maximum(q_max, tile_max)
        mass += linear_sum(without_tokens(q_probs, tokens, excluded, t, TILE))
    if BEYOND:  # noqa: SIM102  (compiled in only where the draft has columns of its own)
        if mode == SUBTRACT:
            more, maximum = beyond_target(q, drafts, v, tokens, excluded, DRAFT, TILE, WIDTH)
            q_max = tl.maximum(q_max, maximum)
            mass += more
    return mass, invalid_draft(mode, q_max, DRAFT).to(tl.int32)


@triton.jit
def top_k_plus_one(
    p, p_stats, children, depth, tree, drafts, mode, params, noise, scratch, accept_probs,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """-> (the accepted child or -1, the token, status).

    The last child was sampled from Q off the tokens of the others, which are the likeliest ones. If
    it is rejected, the token drawn from the residual may be one of the others.
    """
    tokens = tree.tokens
    entries = scratch.entries
    logsumexp = p_stats.logsumexp
    one = tl.full([], 1.0, tl.float32)
    index = tl.arange(0, tokens.shape[0])
    n = tl.max(tl.where(children > 0, index, -1), 0)
    x = element(tokens, n)
    draft = element(tree.draft_rows, n)
    group = draft.to(tl.float64)
    top_k = tl.where(index == n, 0, children)
    node = flag(-1)
    token = tl.full([], -1, tl.int64)
    flags = flag(0)
    count = flag(0)
    if (n >= 0) & (tl.max(tl.where(tokens == x, top_k, 0), 0) == 0):
        q_x, _log_q_x, q_logsumexp, q_threshold, valid = measure_draft(
            drafts, draft, x, mode, n, count, params, scratch, DRAFT, TILE, CHUNK, BLOCK,
            LOG_TILES, WIDTH,
        )  # fmt: skip
        rest = tl.full([], 0.0, tl.float64)
        if valid > 0:
            save_draft_row(entries, n, x, draft, group, q_logsumexp, q_threshold)
            q, _before, _last, _following = saved_draft(entries, n, drafts)
            rest, bad = mass_without(
                q, drafts, mode, p.v, tokens, top_k, scratch.tiles, DRAFT, BEYOND, TILE, WIDTH
            )
            valid = 1 - bad
            rest = tl.where(tl.max(top_k, 0) > 0, rest, 1.0)
        if valid == 0:
            flags = flag(DRAFT_INVALID)
        elif rest > LEAST_MASS:  # otherwise the last child cannot have been drawn, and is skipped
            p_x, _logprob = target_probability(p, x, logsumexp, params.temperature, PROBS)
            u = trial_uniform(noise, n, depth, count)
            hit, accept_prob = accept_against_residual(u, p_x, q_x / rest)
            if accept_probs is not None:
                tl.store(accept_probs + n, accept_prob.to(tl.float32))
            if hit:
                node = n
                token = x
            else:
                _head, _tail, count, _shared = push(entries, n, n, count, n, group, 1.0 / rest)
    if node < 0:
        token, mass, more = draw_residual(
            p, NodeResidual(n, n, count, one, mode, top_k), drafts, tokens,
            tl.full([], 0.0, tl.float64), flag(0), p_stats, scratch, noise, depth, tree.num_nodes,
            RULE, PROBS, DRAFT, TILE, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        flags |= more
        drawn = tl.where(tokens == token, top_k, 0)
        if tl.max(drawn, 0) > 0:
            node = first_node(drawn)
        if accept_probs is not None:
            remaining = top_k
            while tl.max(remaining, 0) > 0:
                m = first_node(remaining)
                y = element(tokens, m)
                p_y, _logprob = target_probability(p, y, logsumexp, params.temperature, PROBS)
                tl.store(accept_probs + m, (p_y / mass).to(tl.float32))
                remaining = tl.where(tokens == y, 0, remaining)
    return node, token, flags
