"""What the target has left at one point of a tree after siblings were rejected.

(c P - sum of scales * Q)+ is never written down: there is an entry in scratch for each draft row
that was taken off, and tiles are computed from P and the rows of the entries when they are needed.
Nodes of one row that come one after the other share an entry, and entries are linked in the order
of the trials. What it takes to read an entry again is the tuple left = (entries, head, count,
share c, whether drafts are point masses, a number a node for what is `barred`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.chain.decide import number
from specdec_kernels.triton.chain.residual import positive, target_tile, unsound
from specdec_kernels.triton.chain.rules import EMPTY_RESIDUAL
from specdec_kernels.triton.row.distribution import density_constants, draw
from specdec_kernels.triton.row.draft import (
    LAW,
    POINT,
    REMOVE,
    SAMPLED,
    SPARSE,
    SUBTRACT,
    density_of,
    draft_probability,
    draft_row,
    draft_tile,
    linear_sum,
)
from specdec_kernels.triton.row.philox import RESIDUAL
from specdec_kernels.triton.row.tile import (
    choose_in_tile,
    choose_tile,
    flag,
    inverse,
    linear_units,
    row_top,
    row_total,
)
from specdec_kernels.triton.tree.rules import (
    K_SEQ,
    MULTI_DRAFT_WOR,
    TOP_K_PLUS_ONE,
    TRAVERSAL,
)

# Float64 numbers of an entry. Its row was taken off twice: what was left before the last time is
# clamped at 0 in between.
BEFORE = tl.constexpr(0)  # scale up to the last trial but one
LAST = tl.constexpr(1)  # scale of the last trial
LOGSUMEXP = tl.constexpr(2)
THRESHOLD = tl.constexpr(3)
DRAFT_ROW = tl.constexpr(4)
TOKEN_ID = tl.constexpr(5)
NEXT = tl.constexpr(6)
REST = tl.constexpr(7)  # mass of Q off its tokens that were tried
GROUP = tl.constexpr(
    8
)  # what was drawn together: the draft row, and without replacement the parent
ENTRY = tl.constexpr(9)

# What a node may be barred from.
FROM_BOTH = tl.constexpr(2)
FROM_DRAFT = tl.constexpr(1)


@triton.jit
def at(vector, n):
    """Element n of a vector [NODES]."""
    index = tl.arange(0, vector.shape[0])
    return tl.sum(tl.where(index == n, vector, 0), 0)


@triton.jit
def first_node(mask):
    """Lowest node of a mask, int32; NODES where there is none."""
    index = tl.arange(0, mask.shape[0])
    return tl.min(tl.where(mask > 0, index, mask.shape[0]), 0)


@triton.jit
def note_law(entries, n, x, draft, group, logsumexp, threshold):
    """What it takes to read node n's draft row again."""
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
    """Take node n's row off -> (head, tail, count, whether it shares the entry of the tail)."""
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
    """The count without the last trial. Nothing is pushed after it."""
    tl.debug_barrier()
    tl.store(entries + tail * ENTRY + LAST, tl.full([], 0.0, tl.float64), mask=shared > 0)
    tl.debug_barrier()
    return tl.where(shared > 0, count, count - 1)


@triton.jit
def entry_law(entries, e, drafts):
    """(q, scale before, scale of the last, next entry) of entry e."""
    entry = entries + e * ENTRY
    x = tl.load(entry + TOKEN_ID).to(tl.int64)
    draft = tl.load(entry + DRAFT_ROW).to(tl.int64)
    threshold = tl.load(entry + THRESHOLD).to(tl.float32)
    q_temp = drafts[7]
    row, first, _there = draft_row(drafts, draft, True)
    c, r = density_constants(tl.load(entry + LOGSUMEXP), q_temp)
    q = (row, first, drafts[4], x, threshold, c, r, inverse(q_temp))
    follower = tl.load(entry + NEXT).to(tl.int32)
    return q, tl.load(entry + BEFORE), tl.load(entry + LAST), follower


@triton.jit
def off(weights, tokens, barred, tile, TILE: tl.constexpr):
    """Weights of a tile, 0 at the tokens of the nodes that are barred."""
    index = tile * TILE + tl.arange(0, TILE)
    end = (tile + 1) * TILE
    inside = (barred > 0) & (tokens >= tile * TILE) & (tokens < end)
    x = tl.min(tl.where(inside, tokens, end), 0)
    while x < end:
        weights = tl.where(index == x, 0.0, weights)
        x = tl.min(tl.where(inside & (tokens > x), tokens, end), 0)
    return weights


@triton.jit
def left_tile(
    p, left, drafts, tokens, tile,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """(what is left of a tile, with its sign at the last row, float32 [TILE]; tops; rest)."""
    entries, head, count, share, mode, barred = left
    out, p_top = target_tile(p, tile, PROBS, TILE)
    if RULE == TRAVERSAL:
        out = out * share
    q_top = tl.full([], float("-inf"), tl.float32)
    rest = tl.full([], 0.0, tl.float64)
    e = head
    for j in range(0, count):
        q, before, last, follower = entry_law(entries, e, drafts)
        taken, q_top = draft_tile(q, drafts[3], tile, p[1], mode, DRAFT, TILE, WIDTH)
        before = before.to(tl.float32)
        last = last.to(tl.float32)
        if RULE == K_SEQ:
            out = out - tl.minimum(taken, out * before) * last
        else:
            if RULE == TOP_K_PLUS_ONE:
                taken = off(taken, tokens, barred, tile, TILE)
            out = positive(positive(out) - taken * before) - taken * last
        if RULE == MULTI_DRAFT_WOR:  # noqa: SIM102  (compiled in for this rule only)
            if j == count - 1:
                rest = linear_sum(off(taken, tokens, barred == FROM_BOTH, tile, TILE))
        e = follower
    if RULE == MULTI_DRAFT_WOR:
        out = off(out, tokens, barred, tile, TILE)
    return out, p_top, q_top, rest


@triton.jit
def beyond(
    q, keys, v, tokens, barred, DRAFT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """(mass of Q on what no token of the target is, off what is barred; the top of those columns).

    With `columns` a token may stand anywhere: the top is that of the row, and the mass is none.
    """
    row, first_id, d, _, threshold, c, r, inv_t = q
    ids, columns = keys
    mass = tl.full([], 0.0, tl.float64)
    top = tl.full([], float("-inf"), tl.float32)
    if DRAFT == SPARSE:
        for start in range(0, d, WIDTH):
            index = start + tl.arange(0, WIDTH)
            token = tl.load(ids + first_id + index, mask=index < d, other=-1).to(tl.int64)
            value = tl.load(row + index, mask=(index < d) & (token >= v), other=0)
            mass += linear_sum(value.to(tl.float32))
    else:
        first = v
        if columns is not None:
            first = 0
        for t in range(first // TILE, tl.cdiv(d, TILE)):
            index = t * TILE + tl.arange(0, TILE)
            inside = (index >= first) & (index < d)
            law, tile_top = density_of(row + index, inside, threshold, c, r, inv_t, DRAFT)
            top = tl.maximum(top, tile_top)
            if columns is None:
                mass += linear_sum(off(law, tokens, barred, t, TILE))
    return mass, top


@triton.jit
def fill_left(
    p, left, drafts, tokens, tail, tiles, scratch,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Masses of all tiles into their slot -> (top of the target, whether the last row is bad, S+,
    S-, mass of the last row off what was tried).

    S+ and S-, which only rule traversal has, are the sums of both signs of what is left.
    """
    entries, _, count, _, mode, barred = left
    scales, sums, slot_size = scratch
    p_top = tl.full([], float("-inf"), tl.float32)
    q_top = tl.full([], float("-inf"), tl.float32)
    more = tl.full([], 0.0, tl.float64)
    less = tl.full([], 0.0, tl.float64)
    rest = tl.full([], 0.0, tl.float64)
    tl.debug_barrier()
    for t in range(0, tiles):
        out, p_tile, q_tile, rest_tile = left_tile(
            p, left, drafts, tokens, t, RULE, PROBS, DRAFT, TILE, WIDTH
        )
        p_top = tl.maximum(p_top, p_tile)
        q_top = tl.maximum(q_top, q_tile)
        rest += rest_tile
        scale, units = linear_units(positive(out))
        mass = tl.sum(units, 0)
        tl.store(scales + 2 * slot_size + t, scale)
        tl.store(sums + 2 * slot_size + t, mass)
        more += mass.to(tl.float64) * (1.0 / (1 << 48)) * scale.to(tl.float64)
        if RULE == TRAVERSAL:
            less += linear_sum(positive(-out))
    tl.debug_barrier()
    if BEYOND:  # noqa: SIM102  (compiled in only where the draft has columns of its own)
        if (count > 0) & (mode == SUBTRACT):
            q, _before, last, _follower = entry_law(entries, tail, drafts)
            mass_beyond, top = beyond(
                q, drafts[3], p[1], tokens, barred == FROM_BOTH, DRAFT, TILE, WIDTH
            )
            q_top = tl.maximum(q_top, top)
            less += last * mass_beyond
            rest += mass_beyond
    bad = (unsound(mode, q_top, DRAFT) & (count > 0)).to(tl.int32)
    return p_top, bad, more, less, rest


@triton.jit
def left_at(p_x, x, left, drafts, temp, DRAFT: tl.constexpr, WIDTH: tl.constexpr):
    """What is left of one token, float64; p_x is c * P(x)."""
    entries, head, count, _, mode, _ = left
    e = head
    for _ in range(0, count):
        entry = entries + e * ENTRY
        scale = tl.load(entry + BEFORE) + tl.load(entry + LAST)
        same = x == tl.load(entry + TOKEN_ID).to(tl.int64)
        q_x = tl.where(same, 1.0, 0.0).to(tl.float64)
        if DRAFT != POINT:  # noqa: SIM102  (compiled in only where there are rows)
            if mode != REMOVE:
                q_x, log_q_x, _sound = draft_probability(
                    drafts, tl.load(entry + DRAFT_ROW).to(tl.int64), x, temp,
                    tl.load(entry + LOGSUMEXP), tl.load(entry + THRESHOLD).to(tl.float32), DRAFT,
                    True, WIDTH,
                )  # fmt: skip
                if DRAFT == LAW or DRAFT == SAMPLED:  # noqa: SIM109, PLR1714  (no `in` in Triton)
                    q_x = tl.exp(log_q_x)
        p_x = tl.maximum(p_x - scale * q_x, 0.0)
        e = tl.load(entry + NEXT).to(tl.int32)
    return p_x


@triton.jit
def draw_left(
    p, left, drafts, tokens, tail, mass, filled, law, tiles, scratch, noise, depth, nodes,
    RULE: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(token, entries that count, mass it was drawn from, status): drawn from what is left.

    From P where nothing is. `filled` says that the slot for it holds what is left, of this mass;
    the slot of the law holds the masses of P, unless its rows are used as they are.
    """
    row, v, direct, _, _, _, inv_t = p
    entries, head, count, share, mode, barred = left
    top, threshold = law[0], law[1]
    law_tops, law_sums, slot_size = scratch
    tops, sums = law_tops + 2 * slot_size, law_sums + 2 * slot_size
    u = number(noise, depth, nodes + depth, RESIDUAL)
    flags = flag(0)
    token = tl.full([], -1, tl.int64)
    scale = tl.full([], 0.0, tl.float32)
    linear = (direct | (count > 0)).to(tl.int32)
    work = linear
    while work > 0:
        work = flag(0)
        if filled == 0:
            _p_top, _bad, mass, _less, _rest = fill_left(
                p, (entries, head, count, share, mode, barred), drafts, tokens, tail, tiles,
                scratch, RULE, PROBS, DRAFT, False, TILE, WIDTH,
            )  # fmt: skip
        filled = flag(0)
        scale = row_top(tops, tiles, BLOCK)
        if (count > 0) & (mass == 0):
            # Nothing to take off: sample from the target.
            flags = flag(EMPTY_RESIDUAL)
            count = flag(0)
            share = tl.full([], 1.0, tl.float32)
            linear = direct.to(tl.int32)
            work = linear
    if linear > 0:
        total = row_total(tops, sums, tiles, scale, inv_t, True, LOG_TILES, BLOCK)
        tile, rest = choose_tile(
            tops, sums, tiles, scale, inv_t, u * total.to(tl.float64), True, LOG_TILES, BLOCK
        )
        out, _p_tile, _q_tile, _rest = left_tile(
            p, (entries, head, count, share, mode, barred), drafts, tokens, tile, RULE, PROBS,
            DRAFT, TILE, WIDTH,
        )  # fmt: skip
        _, units = linear_units(positive(out))
        token = (tile * TILE + choose_in_tile(units, rest, TILE)).to(tl.int64)
    else:
        token = draw(
            row, v, tiles, law_tops, law_sums, top, threshold, inv_t, u, PROBS, TILE, BLOCK,
            LOG_TILES,
        ).to(tl.int64)  # fmt: skip
        mass = tl.full([], 1.0, tl.float64)
    return token, count, mass, flags
