"""The residual at one node of a tree after some of its children were rejected.

Terms of this room:

node         A drafted token of the tree. Node -1 is the root, which is the last committed token.
children     The nodes whose parent is a node. Siblings have one parent and are tried in the order
             of their indices; a trial is one sibling that is tried.
group        Siblings that were drawn together: those of one draft row, and in a draft without
             replacement also of one parent.
excluded     A node whose token cannot be drawn again, because it was drawn without replacement.
rest         The mass of Q off the tokens of its group that were tried.

The residual (c P - sum of scales * Q)+ is never written down. Scratch holds an entry for each draft
row that was subtracted, and tiles are computed from P and the rows of the entries when they are
needed. Successive trials of one group share an entry, and entries are linked in the order of the
trials. docs/rules.md#multi_draft and the sections after it have the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..chain.residual import invalid_draft, positive, target_tile
from ..chain.sequence import row_uniform
from ..row.distribution import draw_token, weight_params
from ..row.draft import (
    DRAFT_LOGITS,
    ONE_HOT,
    REMOVE,
    SAMPLED,
    SPARSE,
    SUBTRACT,
    DraftDistribution,
    draft_probabilities,
    draft_probability,
    draft_row,
    draft_tile,
    linear_sum,
)
from ..row.noise import RESIDUAL
from ..row.status import EMPTY_RESIDUAL
from ..row.tile import (
    choose_in_tile,
    choose_tile,
    flag,
    inverse,
    linear_units,
    row_maximum,
    row_total,
    stats_at,
)
from .rules import K_SEQ, MULTI_DRAFT_WOR, TOP_K_PLUS_ONE, TRAVERSAL

# The float64 numbers of an entry. The two scales are subtracted one after the other, because the
# residual is clamped at 0 before the last trial.
BEFORE = tl.constexpr(0)  # scale of Q in all trials but the last
LAST = tl.constexpr(1)  # scale of Q in the last trial
LOGSUMEXP = tl.constexpr(2)
THRESHOLD = tl.constexpr(3)
DRAFT_ROW = tl.constexpr(4)
TOKEN_ID = tl.constexpr(5)
NEXT = tl.constexpr(6)
REST = tl.constexpr(7)
GROUP = tl.constexpr(8)
ENTRY = tl.constexpr(9)

# How a node is excluded.
FROM_DRAFT = tl.constexpr(1)  # Q of another group can still draw its token
FROM_BOTH = tl.constexpr(2)

# Whose tile statistics the three parts of a sequence's scratch hold.
TARGET_STATS = tl.constexpr(0)
DRAFT_STATS = tl.constexpr(1)
RESIDUAL_STATS = tl.constexpr(2)


class NodeResidual(NamedTuple):
    """The inputs of the residual at one node."""

    head: Any  # first entry
    tail: Any  # last entry
    count: Any
    p_scale: Any
    mode: Any
    excluded: Any  # for each node: 0, FROM_DRAFT or FROM_BOTH; a mask in top_k_plus_one


@triton.jit
def element(vector, n):
    """Element n of a vector [NODES]."""
    index = tl.arange(0, vector.shape[0])
    return tl.sum(tl.where(index == n, vector, 0), 0)


@triton.jit
def first_node(mask):
    """The lowest node of a mask, int32; NODES where there is none."""
    index = tl.arange(0, mask.shape[0])
    return tl.min(tl.where(mask > 0, index, mask.shape[0]), 0)


@triton.jit
def save_draft_row(entries, n, x, draft, group, logsumexp, threshold):
    """Save in node n's entry what it takes to read its draft row again."""
    entry = entries + n * ENTRY
    tl.debug_barrier()
    tl.store(entry + LOGSUMEXP, logsumexp)
    tl.store(entry + THRESHOLD, threshold.to(tl.float64))
    tl.store(entry + DRAFT_ROW, draft.to(tl.float64))
    tl.store(entry + TOKEN_ID, x.to(tl.float64))
    tl.store(entry + GROUP, group)
    tl.debug_barrier()


@triton.jit
def push(entries, head, tail, count, n, group, scale):
    """Subtract node n's draft row -> (head, tail, count, whether it shares the tail's entry)."""
    shared = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    if count > 0:
        entry = entries + tail * ENTRY
        shared = (tl.load(entry + GROUP) == group).to(tl.int32)
        before = tl.load(entry + BEFORE) + tl.load(entry + LAST)
    tl.debug_barrier()
    if shared > 0:
        tl.store(entries + tail * ENTRY + BEFORE, before)
        tl.store(entries + tail * ENTRY + LAST, scale)
    else:
        tl.store(entries + n * ENTRY + BEFORE, tl.full([], 0.0, tl.float64))
        tl.store(entries + n * ENTRY + LAST, scale)
        tl.store(entries + tail * ENTRY + NEXT, n.to(tl.float64), mask=count > 0)
        head = tl.where(count > 0, head, n)
        tail = n
        count += 1
    tl.debug_barrier()
    return head, tail, count, shared


@triton.jit
def undo(entries, tail, count, shared):
    """Take the last trial back -> count. Nothing may be pushed after it."""
    tl.debug_barrier()
    tl.store(entries + tail * ENTRY + LAST, tl.full([], 0.0, tl.float64), mask=shared > 0)
    tl.debug_barrier()
    return tl.where(shared > 0, count, count - 1)


@triton.jit
def saved_draft(entries, e, drafts):
    """(Q, scale before the last trial, scale of the last trial, next entry) of entry e."""
    entry = entries + e * ENTRY
    x = tl.load(entry + TOKEN_ID).to(tl.int64)
    draft = tl.load(entry + DRAFT_ROW).to(tl.int64)
    threshold = tl.load(entry + THRESHOLD).to(tl.float32)
    temperature = drafts.temperature
    row, first_id, _there = draft_row(drafts, draft, True)
    weights = weight_params(
        threshold, tl.load(entry + LOGSUMEXP), temperature, inverse(temperature)
    )
    q = DraftDistribution(row, first_id, drafts.d, x, weights)
    following = tl.load(entry + NEXT).to(tl.int32)
    return q, tl.load(entry + BEFORE), tl.load(entry + LAST), following


@triton.jit
def without_tokens(weights, tokens, mask, tile, TILE: tl.constexpr):
    """The weights of a tile, set to 0 at the tokens of the nodes in `mask`."""
    index = tile * TILE + tl.arange(0, TILE)
    end = (tile + 1) * TILE
    inside = (mask > 0) & (tokens >= tile * TILE) & (tokens < end)
    x = tl.min(tl.where(inside, tokens, end), 0)
    while x < end:
        weights = tl.where(index == x, 0.0, weights)
        x = tl.min(tl.where(inside & (tokens > x), tokens, end), 0)
    return weights


@triton.jit
def residual_tile(
    p, residual, entries, drafts, tokens, tile,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """(residual of a tile, float32 [TILE]; maxima of P's and the last Q's row; rest of that Q).

    Negative values of the last subtraction are kept: rule traversal needs their sum.
    """
    out, p_max = target_tile(p, tile, PROBS, TILE)
    if RULE == TRAVERSAL:
        out = out * residual.p_scale
    q_max = tl.full([], float("-inf"), tl.float32)
    rest = tl.full([], 0.0, tl.float64)
    e = residual.head
    for j in range(0, residual.count):
        q, before, last, following = saved_draft(entries, e, drafts)
        q_probs, q_max = draft_tile(q, drafts, tile, p.v, residual.mode, DRAFT, TILE, WIDTH)
        before = before.to(tl.float32)
        last = last.to(tl.float32)
        if RULE == K_SEQ:
            out = out - tl.minimum(q_probs, out * before) * last
        else:
            if RULE == TOP_K_PLUS_ONE:
                q_probs = without_tokens(q_probs, tokens, residual.excluded, tile, TILE)
            if before > 0:  # Q is infinite where its statistics are wrong, and 0 times that NaN
                out = positive(positive(out) - q_probs * before)
            out = positive(out) - q_probs * last
        if RULE == MULTI_DRAFT_WOR:  # noqa: SIM102  (compiled in for this rule only)
            if j == residual.count - 1:
                tried = residual.excluded == FROM_BOTH
                rest = linear_sum(without_tokens(q_probs, tokens, tried, tile, TILE))
        e = following
    if RULE == MULTI_DRAFT_WOR:
        out = without_tokens(out, tokens, residual.excluded, tile, TILE)
    return out, p_max, q_max, rest


@triton.jit
def beyond_target(
    q, drafts, v, tokens, excluded, DRAFT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """(mass of Q on what is no token of the target, off excluded tokens; their maximum).

    With `columns` any column may belong to a token, so the maximum is that of the row and the mass
    is 0.
    """
    mass = tl.full([], 0.0, tl.float64)
    maximum = tl.full([], float("-inf"), tl.float32)
    if DRAFT == SPARSE:
        for start in range(0, q.d, WIDTH):
            index = start + tl.arange(0, WIDTH)
            ids = drafts.ids + q.first_id + index
            token = tl.load(ids, mask=index < q.d, other=-1).to(tl.int64)
            value = tl.load(q.row + index, mask=(index < q.d) & (token >= v), other=0)
            mass += linear_sum(value.to(tl.float32))
    else:
        first = v
        if drafts.columns is not None:
            first = 0
        for t in range(first // TILE, tl.cdiv(q.d, TILE)):
            index = t * TILE + tl.arange(0, TILE)
            inside = (index >= first) & (index < q.d)
            probs, tile_max = draft_probabilities(q.row + index, inside, q.weights, DRAFT)
            maximum = tl.maximum(maximum, tile_max)
            if drafts.columns is None:
                mass += linear_sum(without_tokens(probs, tokens, excluded, t, TILE))
    return mass, maximum


@triton.jit
def fill_residual(
    p, residual, drafts, tokens, scratch,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the residual's tile masses -> (whether the last draft row is invalid, S+, S-, rest).

    S+ and S- are the sums of the positive and the negative parts; only rule traversal has an S-.
    """
    stats = stats_at(scratch, RESIDUAL_STATS, scratch.tiles)
    q_max = tl.full([], float("-inf"), tl.float32)
    positive_sum = tl.full([], 0.0, tl.float64)
    negative_sum = tl.full([], 0.0, tl.float64)
    rest = tl.full([], 0.0, tl.float64)
    tl.debug_barrier()
    for t in range(0, scratch.tiles):
        out, _p_tile, q_tile, rest_tile = residual_tile(
            p, residual, scratch.entries, drafts, tokens, t, RULE, PROBS, DRAFT, TILE, WIDTH
        )
        q_max = tl.maximum(q_max, q_tile)
        rest += rest_tile
        scale, units = linear_units(positive(out))
        mass = tl.sum(units, 0)
        tl.store(stats.maxima + t, scale)
        tl.store(stats.sums + t, mass)
        positive_sum += mass.to(tl.float64) * (1.0 / (1 << 48)) * scale.to(tl.float64)
        if RULE == TRAVERSAL:
            negative_sum += linear_sum(positive(-out))
    tl.debug_barrier()
    if BEYOND:  # noqa: SIM102  (compiled in only where the draft has columns of its own)
        if (residual.count > 0) & (residual.mode == SUBTRACT):
            q, _before, last, _following = saved_draft(scratch.entries, residual.tail, drafts)
            mass_beyond, maximum = beyond_target(
                q, drafts, p.v, tokens, residual.excluded == FROM_BOTH, DRAFT, TILE, WIDTH
            )
            q_max = tl.maximum(q_max, maximum)
            negative_sum += last * mass_beyond
            rest += mass_beyond
    bad = (invalid_draft(residual.mode, q_max, DRAFT) & (residual.count > 0)).to(tl.int32)
    return bad, positive_sum, negative_sum, rest


@triton.jit
def residual_at(
    p_x, x, residual, entries, drafts, temperature, DRAFT: tl.constexpr, WIDTH: tl.constexpr
):
    """The residual of one token, float64; p_x is c * P(x)."""
    e = residual.head
    for _ in range(0, residual.count):
        entry = entries + e * ENTRY
        scale = tl.load(entry + BEFORE) + tl.load(entry + LAST)
        same = x == tl.load(entry + TOKEN_ID).to(tl.int64)
        q_x = tl.where(same, 1.0, 0.0).to(tl.float64)
        if DRAFT != ONE_HOT:  # noqa: SIM102  (compiled in only where there are rows)
            if residual.mode != REMOVE:
                q_x, log_q_x, _valid = draft_probability(
                    drafts, tl.load(entry + DRAFT_ROW).to(tl.int64), x, temperature,
                    tl.load(entry + LOGSUMEXP), tl.load(entry + THRESHOLD).to(tl.float32), DRAFT,
                    True, WIDTH,
                )  # fmt: skip
                if DRAFT == DRAFT_LOGITS or DRAFT == SAMPLED:  # noqa: SIM109, PLR1714
                    q_x = tl.exp(log_q_x)
        p_x = tl.maximum(p_x - scale * q_x, 0.0)
        e = tl.load(entry + NEXT).to(tl.int32)
    return p_x


@triton.jit
def draw_residual(
    p, residual, drafts, tokens, mass, filled, p_stats, scratch, noise, depth, num_nodes,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw from the residual, or from P where it is empty -> (token, the mass drawn from, status).

    `filled` says that scratch holds the residual's tile masses, of sum `mass`. It also holds those
    of P, unless P is direct.
    """
    target_stats = stats_at(scratch, TARGET_STATS, scratch.tiles)
    stats = stats_at(scratch, RESIDUAL_STATS, scratch.tiles)
    inv_t = p.weights.inv_t
    count = residual.count
    p_scale = residual.p_scale
    u = row_uniform(noise, depth, num_nodes + depth, RESIDUAL)
    flags = flag(0)
    token = tl.full([], -1, tl.int64)
    scale = tl.full([], 0.0, tl.float32)
    linear = (p.direct | (count > 0)).to(tl.int32)
    work = linear
    while work > 0:
        work = flag(0)
        if filled == 0:
            current = NodeResidual(
                residual.head, residual.tail, count, p_scale, residual.mode, residual.excluded
            )
            _bad, mass, _negative_sum, _rest = fill_residual(
                p, current, drafts, tokens, scratch, RULE, PROBS, DRAFT, False, TILE, WIDTH
            )
        filled = flag(0)
        scale = row_maximum(stats, BLOCK)
        if (count > 0) & (mass == 0):
            # The residual is empty, so the token is drawn from P.
            flags = flag(EMPTY_RESIDUAL)
            count = flag(0)
            p_scale = tl.full([], 1.0, tl.float32)
            linear = p.direct.to(tl.int32)
            work = linear
    if linear > 0:
        total = row_total(stats, scale, inv_t, True, LOG_TILES, BLOCK)
        tile, rest = choose_tile(
            stats, scale, inv_t, u * total.to(tl.float64), True, LOG_TILES, BLOCK
        )
        current = NodeResidual(
            residual.head, residual.tail, count, p_scale, residual.mode, residual.excluded
        )
        out, _p_max, _q_max, _rest = residual_tile(
            p, current, scratch.entries, drafts, tokens, tile, RULE, PROBS, DRAFT, TILE, WIDTH
        )
        _, units = linear_units(positive(out))
        token = (tile * TILE + choose_in_tile(units, rest, TILE)).to(tl.int64)
    else:
        token = draw_token(
            p.row, p.v, target_stats, p_stats.maximum, p_stats.threshold, inv_t, u, PROBS, TILE,
            BLOCK, LOG_TILES,
        ).to(tl.int64)  # fmt: skip
        mass = tl.full([], 1.0, tl.float64)
    return token, mass, flags
