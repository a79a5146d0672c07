"""Rule traversal: a tree is verified from its leaves to the root. On a chain it is rule block.

A node is entered with a scale c of P, the probability of keeping the path to it. Each child that is
rejected, with everything below it, subtracts its Q from the node's residual. When no child remains,
the node's own acceptance uniform decides. docs/rules.md#traversal has the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..chain.block import residual_sums, round_uniform
from ..chain.decide import ratio
from ..chain.sequence import TargetDistribution
from ..row.distribution import MASSES, RowStats, weight_params
from ..row.draft import ONE_HOT, SPARSE
from ..row.status import DRAFT_INVALID, EMPTY_RESIDUAL, TARGET_INVALID
from ..row.tile import (
    flag,
    log_probability,
    row_maximum,
    row_total,
    stats_at,
)
from .decide import children_of, is_eos, node_target
from .residual import (
    RESIDUAL_STATS,
    NodeResidual,
    draw_residual,
    element,
    fill_residual,
    first_node,
    push,
    residual_at,
    save_draft_row,
    saved_draft,
    undo,
)
from .siblings import measure_draft, target_probability

# The float64 numbers that a node keeps while the nodes below it are verified.
P_SCALE = tl.constexpr(0)
ACCEPT_PROB = tl.constexpr(1)  # as far as its children have been rejected
MASS = tl.constexpr(2)  # of the residual
LOGSUMEXP = tl.constexpr(3)
THRESHOLD = tl.constexpr(4)
HEAD = tl.constexpr(5)
TAIL = tl.constexpr(6)
COUNT = tl.constexpr(7)
STATE = tl.constexpr(8)


@triton.jit
def save_residual(state, accept_prob, mass, head, tail, count):
    tl.debug_barrier()
    tl.store(state + ACCEPT_PROB, accept_prob)
    tl.store(state + MASS, mass)
    tl.store(state + HEAD, head.to(tl.float64))
    tl.store(state + TAIL, tail.to(tl.float64))
    tl.store(state + COUNT, count.to(tl.float64))
    tl.debug_barrier()


@triton.jit
def save_target(state, p_scale, logsumexp, threshold):
    tl.debug_barrier()
    tl.store(state + P_SCALE, p_scale)
    tl.store(state + LOGSUMEXP, logsumexp)
    tl.store(state + THRESHOLD, threshold.to(tl.float64))
    tl.debug_barrier()


@triton.jit
def saved_target(row, v, state, params):
    """(P, logsumexp) of a target row whose statistics were saved."""
    logsumexp = tl.load(state + LOGSUMEXP)
    threshold = tl.load(state + THRESHOLD).to(tl.float32)
    weights = weight_params(threshold, logsumexp, params.temperature, params.inv_t)
    return TargetDistribution(row, v, params.direct, weights), logsumexp


@triton.jit
def emit_path(node, depth, tree, rows, v, states, params, out, PROBS: tl.constexpr):
    """Write the accepted nodes, their tokens and log-probabilities, from the last one up."""
    while depth > 0:
        depth -= 1
        token = element(tree.tokens, node)
        tl.store(out.path + depth, node.to(out.path.dtype.element_ty))
        tl.store(out.tokens + depth, token.to(out.tokens.dtype.element_ty))
        node = element(tree.parents, node)
        if out.logprobs is not None:
            p, logsumexp = saved_target(
                rows.first + (node.to(tl.int64) + 1) * rows.stride, v, states + (node + 1) * STATE,
                params,
            )  # fmt: skip
            _p_x, logprob = target_probability(p, token, logsumexp, params.temperature, PROBS)
            tl.store(out.logprobs + depth, logprob.to(tl.float32))


@triton.jit
def emit_recovered_or_bonus(
    node, depth, tree, rows, drafts, mode, params, noise, scratch, states, filled, out, v,
    RULE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw and write the token after the last accepted node -> status.

    It comes from the node's residual, or from P if no child of the node was rejected.
    """
    stats = stats_at(scratch, RESIDUAL_STATS, scratch.tiles)
    tokens = tree.tokens
    none = tokens * 0  # nothing is excluded
    state = states + (node + 1) * STATE
    row = rows.first + (node.to(tl.int64) + 1) * rows.stride
    head = tl.load(state + HEAD).to(tl.int32)
    tail = tl.load(state + TAIL).to(tl.int32)
    count = tl.load(state + COUNT).to(tl.int32)
    p_scale = tl.load(state + P_SCALE).to(tl.float32)
    flags = flag(0)
    if count > 0:
        p, _logsumexp = saved_target(row, v, state, params)
        if filled == 0:
            _bad, _positive_sum, _negative_sum, _rest = fill_residual(
                p, NodeResidual(head, tail, count, p_scale, mode, none), drafts, tokens, scratch,
                RULE, PROBS, DRAFT, False, TILE, WIDTH,
            )  # fmt: skip
        scale = row_maximum(stats, BLOCK)
        if row_total(stats, scale, params.inv_t, True, LOG_TILES, BLOCK) == 0:
            flags = flag(EMPTY_RESIDUAL)
            count = flag(0)
    valid = flag(1)
    maximum = tl.full([], 0.0, tl.float32)
    if count == 0:
        p_scale = tl.full([], 1.0, tl.float32)
        _p, p_stats, valid = node_target(
            row, v, params, noise, depth, scratch, MASSES, FILTERS, PROBS, TILE, CHUNK, BLOCK,
            LOG_TILES,
        )  # fmt: skip
        maximum = p_stats.maximum
        one = tl.full([], 1.0, tl.float64)
        save_target(state, one, p_stats.logsumexp, p_stats.threshold)
    if valid > 0:
        p, logsumexp = saved_target(row, v, state, params)
        token, _mass, _flags = draw_residual(
            p, NodeResidual(head, tail, count, p_scale, mode, none), drafts, tokens,
            tl.full([], 1.0, tl.float64), (count > 0).to(tl.int32),
            RowStats(maximum, p.weights.threshold, logsumexp), scratch, noise, depth,
            tree.num_nodes, RULE, PROBS, DRAFT, TILE, BLOCK, LOG_TILES, WIDTH,
        )  # fmt: skip
        tl.store(out.tokens + depth, token.to(out.tokens.dtype.element_ty))
        if out.logprobs is not None:
            _p_x, logprob = target_probability(p, token, logsumexp, params.temperature, PROBS)
            tl.store(out.logprobs + depth, logprob.to(tl.float32))
    else:
        flags = flag(TARGET_INVALID)
    return flags


@triton.jit
def traversal(
    rows, tree, drafts, mode, params, noise, scratch, states, limits, out, v,
    RULE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
    BEYOND: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Verify one sequence -> (accepted nodes, status)."""
    temperature = params.temperature
    tokens = tree.tokens
    none = tokens * 0  # nothing is excluded
    entries = scratch.entries
    lists_tokens: tl.constexpr = DRAFT == ONE_HOT or DRAFT == SPARSE  # noqa: PLR1714
    index = tl.arange(0, tokens.shape[0])
    node = flag(-1)
    depth = flag(0)
    rejected = flag(-1)  # the child that was rejected last, or -1 where a node is entered
    p_scale = tl.full([], 1.0, tl.float64)
    ended = flag(0)
    fault = flag(0)
    filled = flag(0)
    going = flag(1)
    while going > 0:
        state = states + (node + 1) * STATE
        row = rows.first + (node.to(tl.int64) + 1) * rows.stride
        remaining = (index > rejected) & (depth < limits.max_depth)
        remaining = tl.where(remaining, children_of(node, tree), 0)
        filled = flag(0)
        fault = flag(0)
        if rejected < 0:
            ended = flag(0)
            if node >= 0:
                ended = tl.maximum(
                    (depth == limits.max_new_tokens).to(tl.int32),
                    is_eos(element(tokens, node), limits.eos_token_ids, limits.num_eos),
                )
            remaining = tl.where(ended > 0, 0, remaining)
            logsumexp = tl.full([], 0.0, tl.float64)
            threshold = tl.full([], float("-inf"), tl.float32)
            if tl.max(remaining, 0) > 0:  # the row of a node without children is not read here
                _p, p_stats, valid = node_target(
                    row, v, params, noise, depth, scratch, MASSES, FILTERS, PROBS, TILE, CHUNK,
                    BLOCK, LOG_TILES,
                )  # fmt: skip
                threshold = p_stats.threshold
                logsumexp = p_stats.logsumexp
                if valid == 0:
                    fault = flag(TARGET_INVALID)
                    remaining = remaining * 0
            save_target(state, p_scale, logsumexp, threshold)
            one = tl.full([], 1.0, tl.float64)
            save_residual(state, p_scale, one, flag(-1), flag(-1), flag(0))
        else:
            ended = flag(0)
        p, logsumexp = saved_target(row, v, state, params)
        c = tl.load(state + P_SCALE)
        accept_prob = tl.load(state + ACCEPT_PROB)
        mass = tl.load(state + MASS)
        head = tl.load(state + HEAD).to(tl.int32)
        tail = tl.load(state + TAIL).to(tl.int32)
        count = tl.load(state + COUNT).to(tl.int32)
        if rejected >= 0:
            positive_sum = tl.full([], 0.0, tl.float64)
            negative_sum = tl.full([], 0.0, tl.float64)
            bad = flag(0)
            first = (count == 0).to(tl.int32)
            group = element(tree.draft_rows, rejected).to(tl.float64)
            head, tail, count, shared = push(entries, head, tail, count, rejected, group, mass)
            scan = flag(1)
            if lists_tokens:  # noqa: SIM102  (compiled in only for drafts of a few tokens)
                if first > 0:  # the sums of one subtraction need no scan of the row
                    scan = flag(0)
                    q, _before, _last, _following = saved_draft(entries, rejected, drafts)
                    x = element(tokens, rejected)
                    p_x = tl.exp(log_probability(
                        row, x, x < v, params.direct, temperature, logsumexp, p.weights.threshold,
                        PROBS,
                    ))  # fmt: skip
                    _p_max, positive_sum, negative_sum = residual_sums(
                        p, q, drafts, p_x, scratch.tiles, c, temperature, logsumexp, PROBS, DRAFT,
                        TILE, WIDTH,
                    )  # fmt: skip
            if scan > 0:
                bad, positive_sum, negative_sum, _rest = fill_residual(
                    p, NodeResidual(head, tail, count, c.to(tl.float32), mode, none), drafts,
                    tokens, scratch, RULE, PROBS, DRAFT, BEYOND, TILE, WIDTH,
                )  # fmt: skip
                filled = flag(1)
            if (bad > 0) | ((negative_sum > 0) == 0):
                fault = tl.where(bad > 0, DRAFT_INVALID, EMPTY_RESIDUAL).to(tl.int32)
                count = undo(entries, tail, count, shared)
                remaining = remaining * 0
                filled = flag(0)
            else:
                accept_prob = tl.minimum(positive_sum / negative_sum, 1.0)
                mass = negative_sum
            save_residual(state, accept_prob, mass, head, tail, count)
        entering = flag(0)
        if tl.max(remaining, 0) > 0:
            n = first_node(remaining)
            x = element(tokens, n)
            draft = element(tree.draft_rows, n)
            q_x, log_q_x, q_logsumexp, q_threshold, valid = measure_draft(
                drafts, draft, x, mode, tail, count, params, scratch, DRAFT, TILE, CHUNK, BLOCK,
                LOG_TILES, WIDTH,
            )  # fmt: skip
            if valid > 0:
                entering = flag(1)
                save_draft_row(entries, n, x, draft, draft.to(tl.float64), q_logsumexp, q_threshold)
                p_x, logprob = target_probability(p, x, logsumexp, temperature, PROBS)
                if count == 0:
                    step = ratio(p_x, q_x, logprob, log_q_x, params.direct, PROBS, DRAFT)
                    kept = (c * p_x > 0) & (step > 0)
                    p_scale = tl.where(kept, tl.minimum(c * step, 1.0), 0.0)
                else:
                    residual_x = residual_at(
                        c * p_x, x, NodeResidual(head, tail, count, c.to(tl.float32), mode, none),
                        entries, drafts, temperature, DRAFT, WIDTH,
                    ) / mass  # fmt: skip
                    p_scale = tl.where(q_x > 0, residual_x / tl.where(q_x > 0, q_x, 1.0), 1.0)
                    p_scale = tl.where(residual_x > 0, tl.minimum(p_scale, 1.0), 0.0)
                node = n
                depth += 1
                rejected = flag(-1)
            else:
                fault = flag(DRAFT_INVALID)
        if entering == 0:
            accepted = flag(1)
            if node >= 0:
                if out.accept_probs is not None:
                    tl.store(out.accept_probs + node, accept_prob.to(tl.float32))
                accepted = (round_uniform(noise, node) < accept_prob).to(tl.int32)
            if accepted > 0:
                going = flag(0)
            else:
                rejected = node
                node = element(tree.parents, node).to(tl.int32)
                depth -= 1

    emit_path(node, depth, tree, rows, v, states, params, out, PROBS)
    flags = flag(0)
    if ended == 0:
        flags = fault
        if fault != TARGET_INVALID:
            flags |= emit_recovered_or_bonus(
                node, depth, tree, rows, drafts, mode, params, noise, scratch, states, filled, out,
                v, RULE, FILTERS, PROBS, DRAFT, TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
            )  # fmt: skip
    return depth, flags
