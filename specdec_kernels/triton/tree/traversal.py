"""Rule traversal: a tree judged from its leaves to the root. On a chain it is rule block."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.chain.block import coin_of_block, sides
from specdec_kernels.triton.chain.decide import ratio
from specdec_kernels.triton.chain.rules import DRAFT_NOT_FINITE, EMPTY_RESIDUAL, TARGET_NOT_FINITE
from specdec_kernels.triton.row.distribution import MASS, density_constants
from specdec_kernels.triton.row.draft import POINT, SPARSE
from specdec_kernels.triton.row.tile import flag, log_probability, row_top, row_total
from specdec_kernels.triton.tree.decide import children_of, ends, point
from specdec_kernels.triton.tree.residual import (
    at,
    draw_left,
    entry_law,
    fill_left,
    first_node,
    left_at,
    note_law,
    push,
    undo,
)
from specdec_kernels.triton.tree.siblings import law_at, target_at

# Float64 numbers that a node on the way keeps while those below it are judged.
SHARE = tl.constexpr(0)  # c
CHANCE = tl.constexpr(1)  # that the node stands, as far as its children are judged
LEFT = tl.constexpr(2)  # mass of what they left
LAW_SUM = tl.constexpr(3)
LAW_CUT = tl.constexpr(4)
HEAD = tl.constexpr(5)
TAIL = tl.constexpr(6)
COUNT = tl.constexpr(7)
STATE = tl.constexpr(8)


@triton.jit
def save(state, chance, left, head, tail, count):
    tl.debug_barrier()
    tl.store(state + CHANCE, chance)
    tl.store(state + LEFT, left)
    tl.store(state + HEAD, head.to(tl.float64))
    tl.store(state + TAIL, tail.to(tl.float64))
    tl.store(state + COUNT, count.to(tl.float64))
    tl.debug_barrier()


@triton.jit
def save_law(state, share, logsumexp, threshold):
    tl.debug_barrier()
    tl.store(state + SHARE, share)
    tl.store(state + LAW_SUM, logsumexp)
    tl.store(state + LAW_CUT, threshold.to(tl.float64))
    tl.debug_barrier()


@triton.jit
def saved_law(row, v, state, shaping):
    """(p, logsumexp) of a target row that was measured before."""
    logsumexp = tl.load(state + LAW_SUM)
    c, r = density_constants(logsumexp, shaping[0])
    threshold = tl.load(state + LAW_CUT).to(tl.float32)
    return (row, v, shaping[6], threshold, c, r, shaping[1]), logsumexp


@triton.jit
def emit_path(node, depth, tree, rows, v, states, shaping, out, PROBS: tl.constexpr):
    """The accepted nodes, their tokens and log-probabilities, from the last one up."""
    path_out, tokens_out, logprobs_out, _ = out
    tokens, parents, _, _ = tree
    while depth > 0:
        depth -= 1
        token = at(tokens, node)
        tl.store(path_out + depth, node.to(path_out.dtype.element_ty))
        tl.store(tokens_out + depth, token.to(tokens_out.dtype.element_ty))
        node = at(parents, node)
        if logprobs_out is not None:
            p, logsumexp = saved_law(
                rows[0] + (node.to(tl.int64) + 1) * rows[1], v, states + (node + 1) * STATE, shaping
            )
            _p_x, logprob = target_at(p, token, logsumexp, shaping[0], PROBS)
            tl.store(logprobs_out + depth, logprob.to(tl.float32))


@triton.jit
def follow(
    node, depth, tree, rows, drafts, mode, shaping, noise, scratch, entries, states, filled, out,
    v, tiles,
    RULE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw what follows the accepted node from what its children left -> status."""
    tops, sums, slot_size = scratch
    tokens, _, _, nodes = tree
    state = states + (node + 1) * STATE
    row = rows[0] + (node.to(tl.int64) + 1) * rows[1]
    head = tl.load(state + HEAD).to(tl.int32)
    tail = tl.load(state + TAIL).to(tl.int32)
    count = tl.load(state + COUNT).to(tl.int32)
    share = tl.load(state + SHARE).to(tl.float32)
    flags = flag(0)
    if count > 0:
        p, _logsumexp = saved_law(row, v, state, shaping)
        if filled == 0:
            _p_top, _bad, _more, _less, _rest = fill_left(
                p, (entries, head, count, share, mode, tokens), drafts, tokens, tail, tiles,
                scratch, RULE, PROBS, DRAFT, False, TILE, WIDTH,
            )  # fmt: skip
        scale = row_top(tops + 2 * slot_size, tiles, BLOCK)
        if row_total(
            tops + 2 * slot_size, sums + 2 * slot_size, tiles, scale, shaping[1], True, LOG_TILES,
            BLOCK,
        ) == 0:  # fmt: skip
            flags = flag(EMPTY_RESIDUAL)
            count = flag(0)
    alive = flag(1)
    top = tl.full([], 0.0, tl.float32)
    if count == 0:
        share = tl.full([], 1.0, tl.float32)
        _p, law, alive = point(
            row, v, tiles, tops, sums, shaping, noise, depth, MASS, FILTERS, PROBS, TILE, CHUNK,
            BLOCK, LOG_TILES,
        )  # fmt: skip
        top = law[0]
        save_law(state, tl.full([], 1.0, tl.float64), law[2], law[1])
    if alive > 0:
        p, logsumexp = saved_law(row, v, state, shaping)
        token, _count, _mass, _flags = draw_left(
            p, (entries, head, count, share, mode, tokens), drafts, tokens, tail,
            tl.full([], 1.0, tl.float64), (count > 0).to(tl.int32), (top, p[3], logsumexp), tiles,
            scratch, noise, depth, nodes, RULE, PROBS, DRAFT, TILE, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        tl.store(out[1] + depth, token.to(out[1].dtype.element_ty))
        if out[2] is not None:
            _p_x, logprob = target_at(p, token, logsumexp, shaping[0], PROBS)
            tl.store(out[2] + depth, logprob.to(tl.float32))
    else:
        flags = flag(TARGET_NOT_FINITE)
    return flags


@triton.jit
def traversal(
    rows, tree, drafts, mode, shaping, noise, scratch, entries, states, limits, out, v, tiles,
    d_tiles,
    RULE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
    BEYOND: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The verdict on one sequence -> (nodes that stand, status).

    A node is entered with its share c; each child that falls, with all below it, takes its draft
    off what is left; with no child left the node's own coin decides.
    """
    row_0, row_stride = rows
    temp, direct = shaping[0], shaping[6]
    tops, sums, _slot_size = scratch
    tokens, parents, laws, _nodes = tree
    most, max_depth, eos_token_ids, num_eos = limits
    accept_probs = out[3]
    gathered: tl.constexpr = DRAFT == POINT or DRAFT == SPARSE  # noqa: PLR1714
    index = tl.arange(0, tokens.shape[0])
    node = flag(-1)
    depth = flag(0)
    fallen = flag(-1)  # the child that was judged last, or -1 where a node is entered
    share = tl.full([], 1.0, tl.float64)
    over = flag(0)
    fault = flag(0)
    filled = flag(0)
    going = flag(1)
    while going > 0:
        state = states + (node + 1) * STATE
        row = row_0 + (node.to(tl.int64) + 1) * row_stride
        remaining = tl.where((index > fallen) & (depth < max_depth), children_of(node, tree), 0)
        filled = flag(0)
        fault = flag(0)
        if fallen < 0:
            over = flag(0)
            if node >= 0:
                over = tl.maximum(
                    (depth == most).to(tl.int32), ends(at(tokens, node), eos_token_ids, num_eos)
                )
            remaining = tl.where(over > 0, 0, remaining)
            logsumexp = tl.full([], 0.0, tl.float64)
            threshold = tl.full([], float("-inf"), tl.float32)
            if tl.max(remaining, 0) > 0:  # a row is needed where something is judged by it
                _p, law, alive = point(
                    row, v, tiles, tops, sums, shaping, noise, depth, MASS, FILTERS, PROBS, TILE,
                    CHUNK, BLOCK, LOG_TILES,
                )  # fmt: skip
                threshold = law[1]
                logsumexp = law[2]
                if alive == 0:
                    fault = flag(TARGET_NOT_FINITE)
                    remaining = remaining * 0
            save_law(state, share, logsumexp, threshold)
            save(state, share, tl.full([], 1.0, tl.float64), flag(-1), flag(-1), flag(0))
        else:
            over = flag(0)
        p, logsumexp = saved_law(row, v, state, shaping)
        c = tl.load(state + SHARE)
        chance = tl.load(state + CHANCE)
        mass = tl.load(state + LEFT)
        head = tl.load(state + HEAD).to(tl.int32)
        tail = tl.load(state + TAIL).to(tl.int32)
        count = tl.load(state + COUNT).to(tl.int32)
        if fallen >= 0:
            more = tl.full([], 0.0, tl.float64)
            less = tl.full([], 0.0, tl.float64)
            bad = flag(0)
            first = (count == 0).to(tl.int32)
            head, tail, count, shared = push(
                entries, head, tail, count, fallen, at(laws, fallen).to(tl.float64), mass
            )
            scan = flag(1)
            if gathered:  # noqa: SIM102  (compiled in only for drafts of a few tokens)
                if first > 0:  # what one sparse row leaves needs no scan of it
                    scan = flag(0)
                    q, _before, _last, _next = entry_law(entries, fallen, drafts)
                    x = at(tokens, fallen)
                    p_x = tl.exp(log_probability(
                        row, x, x < v, direct, temp, logsumexp, p[3], PROBS
                    ))  # fmt: skip
                    _top, more, less = sides(
                        p, q, drafts[3], p_x, tiles, c, temp, logsumexp, PROBS, DRAFT, TILE, WIDTH
                    )
            if scan > 0:
                _p_top, bad, more, less, _rest = fill_left(
                    p, (entries, head, count, c.to(tl.float32), mode, tokens), drafts, tokens,
                    tail, tiles, scratch, RULE, PROBS, DRAFT, BEYOND, TILE, WIDTH,
                )  # fmt: skip
                filled = flag(1)
            if (bad > 0) | ((less > 0) == 0):
                fault = tl.where(bad > 0, DRAFT_NOT_FINITE, EMPTY_RESIDUAL).to(tl.int32)
                count = undo(entries, tail, count, shared)
                remaining = remaining * 0
                filled = flag(0)
            else:
                chance = tl.minimum(more / less, 1.0)
                mass = less
            save(state, chance, mass, head, tail, count)
        entering = flag(0)
        if tl.max(remaining, 0) > 0:
            n = first_node(remaining)
            x = at(tokens, n)
            draft = at(laws, n)
            q_x, log_q_x, q_logsumexp, q_threshold, sound = law_at(
                drafts, draft, x, mode, entries, tail, count, shaping, scratch, d_tiles, DRAFT,
                TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
            )  # fmt: skip
            if sound > 0:
                entering = flag(1)
                note_law(entries, n, x, draft, draft.to(tl.float64), q_logsumexp, q_threshold)
                p_x, logprob = target_at(p, x, logsumexp, temp, PROBS)
                if count == 0:
                    step = ratio(p_x, q_x, logprob, log_q_x, direct, PROBS, DRAFT)
                    share = tl.where((c * p_x > 0) & (step > 0), tl.minimum(c * step, 1.0), 0.0)
                else:
                    left_x = left_at(
                        c * p_x, x, (entries, head, count, c.to(tl.float32), mode, tokens), drafts,
                        temp, DRAFT, WIDTH,
                    ) / mass  # fmt: skip
                    share = tl.where(q_x > 0, left_x / tl.where(q_x > 0, q_x, 1.0), 1.0)
                    share = tl.where(left_x > 0, tl.minimum(share, 1.0), 0.0)
                node = n
                depth += 1
                fallen = flag(-1)
            else:
                fault = flag(DRAFT_NOT_FINITE)
        if entering == 0:
            stands = flag(1)
            if node >= 0:
                if accept_probs is not None:
                    tl.store(accept_probs + node, chance.to(tl.float32))
                stands = (coin_of_block(noise, node) < chance).to(tl.int32)
            if stands > 0:
                going = flag(0)
            else:
                fallen = node
                node = at(parents, node).to(tl.int32)
                depth -= 1

    emit_path(node, depth, tree, rows, v, states, shaping, out, PROBS)
    flags = flag(0)
    if over == 0:
        flags = fault
        if fault != TARGET_NOT_FINITE:
            flags |= follow(
                node, depth, tree, rows, drafts, mode, shaping, noise, scratch, entries, states,
                filled, out, v, tiles, RULE, FILTERS, PROBS, DRAFT, TILE, CHUNK, BLOCK, LOG_TILES,
                WIDTH,
            )  # fmt: skip
    return depth, flags
