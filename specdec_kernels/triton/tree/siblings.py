"""The rules that judge siblings by P / Q at one point: one by one, and top-k plus one."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.chain.decide import by_ratio
from specdec_kernels.triton.chain.residual import unsound
from specdec_kernels.triton.chain.rules import DRAFT_NOT_FINITE, EMPTY_RESIDUAL, TOKEN
from specdec_kernels.triton.row.draft import (
    LAW,
    POINT,
    SAMPLED,
    SUBTRACT,
    draft_probability,
    draft_statistics,
    draft_tile,
    linear_sum,
)
from specdec_kernels.triton.row.philox import ACCEPT, lane_uniform
from specdec_kernels.triton.row.tile import INF, flag, log_probability
from specdec_kernels.triton.tree.residual import (
    DRAFT_ROW,
    ENTRY,
    FROM_BOTH,
    FROM_DRAFT,
    GROUP,
    LOGSUMEXP,
    NEXT,
    REST,
    at,
    beyond,
    draw_left,
    entry_law,
    fill_left,
    first_node,
    left_at,
    note_law,
    off,
    push,
    undo,
)
from specdec_kernels.triton.tree.rules import LEAST_REST, MULTI_DRAFT_WOR


@triton.jit
def coin(noise, n, i, lane):
    """The coin of node n: that of a trial at depth i, or the given one."""
    seed, position, uniforms = noise
    if uniforms is None:
        u = lane_uniform(lane.to(tl.uint32), seed, position + i, ACCEPT)
    else:
        u = tl.load(uniforms + n)
    return u


@triton.jit
def target_at(p, x, logsumexp, temp, PROBS: tl.constexpr):
    """(P(x), log P(x)) float64; 0 where the target has no such token."""
    row, v, direct, threshold, _, _, _ = p
    logprob = log_probability(row, x, x < v, direct, temp, logsumexp, threshold, PROBS)
    p_x = tl.exp(logprob)
    if PROBS:  # noqa: SIM102  (compiled in only where rows hold probabilities)
        if direct:
            p_x = tl.load(row + x, mask=x < v, other=0).to(tl.float64)
    return p_x, logprob


@triton.jit
def law_at(
    drafts, draft, x, mode, entries, tail, count, shaping, scratch, d_tiles,
    DRAFT: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(Q(x), its logarithm, logsumexp, threshold, whether Q is a law) of the drafted token x.

    The statistics of the tail's row are known.
    """
    tops, sums, slot_size = scratch
    q_x = tl.full([], 0.0, tl.float64)
    log_q_x = tl.full([], 0.0, tl.float64)
    logsumexp = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], float("-inf"), tl.float32)
    sound = flag(1)
    if DRAFT != POINT:
        known = flag(0)
        if (DRAFT == LAW) & (count > 0):
            entry = entries + tail * ENTRY
            known = (tl.load(entry + DRAFT_ROW) == draft.to(tl.float64)).to(tl.int32)
            logsumexp = tl.load(entry + LOGSUMEXP)
        if (mode == SUBTRACT) & (known == 0):
            logsumexp, threshold, there = draft_statistics(
                drafts, draft.to(tl.int64), shaping[0], shaping[1], tops + slot_size,
                sums + slot_size, d_tiles, DRAFT, True, False, TILE, CHUNK, BLOCK, LOG_TILES,
            )  # fmt: skip
            sound = there.to(tl.int32)
    if sound > 0:
        q_x, log_q_x, sound = draft_at(
            drafts, draft, x, x, mode, shaping, logsumexp, threshold, DRAFT, WIDTH
        )
    return q_x, log_q_x, logsumexp, threshold, sound


@triton.jit
def draft_at(
    drafts, draft, x, certain, mode, shaping, logsumexp, threshold, DRAFT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """(Q(x), its logarithm, whether it is a probability); Q may be a point mass at `certain`."""
    q_x = tl.where(x == certain, 1.0, 0.0).to(tl.float64)
    log_q_x = tl.where(x == certain, 0.0, -INF).to(tl.float64)
    sound = flag(1)
    if DRAFT != POINT:  # noqa: SIM102  (compiled in only where there are rows)
        if mode == SUBTRACT:
            q_x, log_q_x, there = draft_probability(
                drafts, draft.to(tl.int64), x, shaping[0], logsumexp, threshold, DRAFT, True, WIDTH
            )
            sound = there.to(tl.int32)
            if DRAFT == LAW or DRAFT == SAMPLED:  # noqa: SIM109, PLR1714  (no `in` in Triton)
                q_x = tl.exp(log_q_x)
    return q_x, log_q_x, sound


@triton.jit
def against(u, p_x, q_x):
    """(whether u * Q(x) < P(x), how likely that was)."""
    chance = tl.where(q_x > 0, tl.minimum(p_x / tl.where(q_x > 0, q_x, 1.0), 1.0), 1.0)
    return u * q_x < p_x, tl.where(p_x > 0, chance, 0.0)


@triton.jit
def at_first(u, p_x, q_x, logprob, log_q_x, direct, PROBS: tl.constexpr, DRAFT: tl.constexpr):
    """The same for the whole target, by rule token's own comparison; P(x) = 0 never stands."""
    hit, chance = by_ratio(
        u, p_x, q_x, logprob, log_q_x, direct, tl.full([], 1.0, tl.float32), TOKEN, PROBS, DRAFT
    )
    return hit & (p_x > 0), tl.where(p_x > 0, chance, 0.0)


@triton.jit
def rest_of(entries, head, count, group):
    """Mass that a row has off its group's tokens that were tried; 1 where none was."""
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
    p, law, children, depth, tree, drafts, mode, shaping, noise, scratch, entries, accept_probs,
    tiles, d_tiles,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rules multi_draft and multi_draft_wor -> (the child that stands or -1, the token, status)."""
    tokens, parents, laws, nodes = tree
    logsumexp = law[2]
    one = tl.full([], 1.0, tl.float32)
    index = tl.arange(0, tokens.shape[0])
    groups = laws.to(tl.float64)
    if RULE == MULTI_DRAFT_WOR:
        groups = groups * (nodes + 1) + (parents + 1)
    remaining = children
    tried = children * 0
    barred = tried
    node = flag(-1)
    token = tl.full([], -1, tl.int64)
    flags = flag(0)
    lane = flag(0)
    head = flag(-1)
    tail = flag(-1)
    count = flag(0)
    filled = flag(0)
    mass = tl.full([], 1.0, tl.float64)
    work = tl.max(remaining, 0)
    while work > 0:
        n = first_node(remaining)
        x = at(tokens, n)
        draft = at(laws, n)
        group = at(groups, n)
        q_x, log_q_x, q_logsumexp, q_threshold, sound = law_at(
            drafts, draft, x, mode, entries, tail, count, shaping, scratch, d_tiles, DRAFT, TILE,
            CHUNK, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        rest = tl.full([], 1.0, tl.float64)
        if RULE == MULTI_DRAFT_WOR:
            rest = rest_of(entries, head, count, group)
        if sound == 0:
            flags = flag(DRAFT_NOT_FINITE)
            work = flag(0)
        elif rest > LEAST_REST:  # else nothing was left to draw this one from
            u = coin(noise, n, depth, lane)
            p_x, logprob = target_at(p, x, logsumexp, shaping[0], PROBS)
            if count == 0:
                hit, chance = at_first(u, p_x, q_x, logprob, log_q_x, p[2], PROBS, DRAFT)
            else:
                left_x = left_at(
                    p_x, x, (entries, head, count, one, mode, barred), drafts, shaping[0], DRAFT,
                    WIDTH,
                )  # fmt: skip
                hit, chance = against(u, left_x, mass * q_x / rest)
            if accept_probs is not None:
                tl.store(accept_probs + n, chance.to(tl.float32))
            if hit:
                node = n
                token = x
                work = flag(0)
            else:
                note_law(entries, n, x, draft, group, q_logsumexp, q_threshold)
                head, tail, count, shared = push(entries, head, tail, count, n, group, mass / rest)
                if RULE == MULTI_DRAFT_WOR:
                    tried = tl.where(index == n, 1, tried)
                    barred = tried * tl.where(groups == group, FROM_BOTH, FROM_DRAFT)
                _p_top, bad, left_mass, _less, rest = fill_left(
                    p, (entries, head, count, one, mode, barred), drafts, tokens, tail, tiles,
                    scratch, RULE, PROBS, DRAFT, BEYOND, TILE, WIDTH,
                )  # fmt: skip
                mass = left_mass
                filled = flag(1)
                if bad > 0:
                    flags = flag(DRAFT_NOT_FINITE)
                    count = undo(entries, tail, count, shared)
                    barred = tl.where(index == n, 0, barred)
                    filled = flag(0)
                    work = flag(0)
                elif left_mass == 0:
                    flags = flag(EMPTY_RESIDUAL)
                    count = flag(0)
                    barred = children * 0
                    filled = flag(0)
                    work = flag(0)
                elif RULE == MULTI_DRAFT_WOR:
                    tl.store(entries + tail * ENTRY + REST, rest)
                    tl.debug_barrier()
        if RULE == MULTI_DRAFT_WOR:
            remaining = tl.where((tokens == x) & (groups == group), 0, remaining)
        else:
            remaining = tl.where(index == n, 0, remaining)
        lane += 1
        work = work * tl.max(remaining, 0)
    if node < 0:
        token, count, _mass, more = draw_left(
            p, (entries, head, count, one, mode, barred), drafts, tokens, tail, mass, filled, law,
            tiles, scratch, noise, depth, nodes, RULE, PROBS, DRAFT, TILE, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        flags |= more
    return node, token, flags


@triton.jit
def mass_off(
    q, drafts, mode, v, tokens, barred, tiles,
    DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(mass of Q off the tokens that are barred, whether its row is bad)."""
    q_top = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float64)
    for t in range(0, tiles):
        taken, top = draft_tile(q, drafts[3], t, v, mode, DRAFT, TILE, WIDTH)
        q_top = tl.maximum(q_top, top)
        mass += linear_sum(off(taken, tokens, barred, t, TILE))
    if BEYOND:  # noqa: SIM102  (compiled in only where the draft has columns of its own)
        if mode == SUBTRACT:
            more, top = beyond(q, drafts[3], v, tokens, barred, DRAFT, TILE, WIDTH)
            q_top = tl.maximum(q_top, top)
            mass += more
    return mass, unsound(mode, q_top, DRAFT).to(tl.int32)


@triton.jit
def top_k_plus_one(
    p, law, children, depth, tree, drafts, mode, shaping, noise, scratch, entries, accept_probs,
    tiles, d_tiles,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """-> (the child that stands or -1, the token, status). The last child was drawn off the others.

    If it does not stand, one of the others may be what is drawn.
    """
    tokens, _, laws, nodes = tree
    logsumexp = law[2]
    one = tl.full([], 1.0, tl.float32)
    index = tl.arange(0, tokens.shape[0])
    n = tl.max(tl.where(children > 0, index, -1), 0)
    x = at(tokens, n)
    group = at(laws, n).to(tl.float64)
    ranked = tl.where(index == n, 0, children)
    node = flag(-1)
    token = tl.full([], -1, tl.int64)
    flags = flag(0)
    count = flag(0)
    if (n >= 0) & (tl.max(tl.where(tokens == x, ranked, 0), 0) == 0):
        draft = at(laws, n)
        q_x, _log_q_x, q_logsumexp, q_threshold, sound = law_at(
            drafts, draft, x, mode, entries, n, count, shaping, scratch, d_tiles, DRAFT, TILE,
            CHUNK, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        rest = tl.full([], 0.0, tl.float64)
        if sound > 0:
            note_law(entries, n, x, draft, group, q_logsumexp, q_threshold)
            q, _before, _last, _next = entry_law(entries, n, drafts)
            rest, bad = mass_off(
                q, drafts, mode, p[1], tokens, ranked, tiles, DRAFT, BEYOND, TILE, WIDTH
            )
            sound = 1 - bad
            rest = tl.where(tl.max(ranked, 0) > 0, rest, 1.0)
        if sound == 0:
            flags = flag(DRAFT_NOT_FINITE)
        elif rest > LEAST_REST:  # else nothing was left to draw the last one from
            p_x, _logprob = target_at(p, x, logsumexp, shaping[0], PROBS)
            hit, chance = against(coin(noise, n, depth, count), p_x, q_x / rest)
            if accept_probs is not None:
                tl.store(accept_probs + n, chance.to(tl.float32))
            if hit:
                node = n
                token = x
            else:
                _head, _tail, count, _shared = push(entries, n, n, count, n, group, 1.0 / rest)
    if node < 0:
        token, _count, mass, more = draw_left(
            p, (entries, n, count, one, mode, ranked), drafts, tokens, n,
            tl.full([], 0.0, tl.float64), flag(0), law, tiles, scratch, noise, depth, nodes, RULE,
            PROBS, DRAFT, TILE, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        flags |= more
        drawn = tl.where(tokens == token, ranked, 0)
        if tl.max(drawn, 0) > 0:
            node = first_node(drawn)
        if accept_probs is not None:
            remaining = ranked
            while tl.max(remaining, 0) > 0:
                m = first_node(remaining)
                y = at(tokens, m)
                p_y, _logprob = target_at(p, y, logsumexp, shaping[0], PROBS)
                tl.store(accept_probs + m, (p_y / mass).to(tl.float32))
                remaining = tl.where(tokens == y, 0, remaining)
    return node, token, flags
