"""The rules that go down a tree from its root, one node at a time: all but rule traversal."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..chain.block import probs_total
from ..chain.decide import target_row
from ..chain.sequence import TargetDistribution, row_uniform
from ..row.distribution import (
    draw_token,
    entropy,
    gumbel_argmax,
    weight_params,
)
from ..row.noise import RESIDUAL
from ..row.status import TARGET_INVALID
from ..row.tile import INF, flag, log_probability, row_argmax, stats_at
from .k_seq import k_seq
from .residual import TARGET_STATS, element, first_node
from .rules import (
    GREEDY,
    K_SEQ,
    MATCH,
    MULTI_DRAFT,
    MULTI_DRAFT_WOR,
    TARGET_ONLY,
    TOP_K_PLUS_ONE,
    TYPICAL,
)
from .siblings import one_by_one, target_probability, top_k_plus_one


class TypicalParams(NamedTuple):
    """The parameters of rule typical."""

    epsilon: Any
    delta: Any


@triton.jit
def node_target(
    row, v, params, noise, depth, scratch, STATS: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr,
):  # fmt: skip
    """(P, its RowStats, whether the row is valid) of a node's target row."""
    no_token = tl.full([], -1, tl.int64)
    _p_x, p_stats, valid = target_row(
        row, no_token, v, stats_at(scratch, TARGET_STATS, scratch.tiles), params, noise, depth,
        STATS, False, FILTERS, PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
    )  # fmt: skip
    weights = weight_params(p_stats.threshold, p_stats.logsumexp, params.temperature, params.inv_t)
    p = TargetDistribution(row, v, params.direct, weights)
    if PROBS:  # noqa: SIM102  (compiled in only where rows hold probabilities)
        if params.direct:
            _total, maximum = probs_total(p, scratch.tiles, PROBS, TILE)
            valid = ((maximum > 0) & (maximum < INF)).to(tl.int32)
    return p, p_stats, valid


@triton.jit
def is_eos(token, eos_token_ids, num_eos):
    """Whether no token follows this one, int32."""
    hit = flag(0)
    if eos_token_ids is not None:
        for e in range(0, num_eos):
            hit = tl.where(token == tl.load(eos_token_ids + e), 1, hit)
    return hit


@triton.jit
def children_of(node, tree):
    """The mask of a node's children, int32."""
    return ((tree.parents == node) & (tree.tokens >= 0)).to(tl.int32)


@triton.jit
def target_token(
    p, p_stats, depth, temperature, noise, scratch, num_nodes, RULE: tl.constexpr,
    PROBS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """The token that the target chooses by itself (rules greedy, match and target_only)."""
    stats = stats_at(scratch, TARGET_STATS, scratch.tiles)
    inv_t = p.weights.inv_t
    token = tl.full([], -1, tl.int64)
    if temperature == 0:
        token = row_argmax(p.row, p.v, stats, p_stats.maximum, PROBS, TILE, BLOCK).to(tl.int64)
    elif RULE == MATCH:
        token = gumbel_argmax(stats, inv_t, TILE, BLOCK).to(tl.int64)
    elif RULE == TARGET_ONLY:
        token = draw_token(
            p.row, p.v, stats, p_stats.maximum, p_stats.threshold, inv_t,
            row_uniform(noise, depth, num_nodes + depth, RESIDUAL), PROBS, TILE, BLOCK, LOG_TILES,
        ).to(tl.int64)  # fmt: skip
    return token


@triton.jit
def child_with_token(
    p, p_stats, token, children, tree, temperature, accept_probs, RULE: tl.constexpr,
    PROBS: tl.constexpr,
):  # fmt: skip
    """The child whose token is the target's own, or -1."""
    tokens = tree.tokens
    hit = tl.where(tokens == token, children, 0)
    if accept_probs is not None:
        remaining = children
        while tl.max(remaining, 0) > 0:
            n = first_node(remaining)
            x = element(tokens, n)
            accept_prob = tl.where(x == token, 1.0, 0.0).to(tl.float64)
            if RULE == TARGET_ONLY:  # noqa: SIM102  (compiled in for this rule only)
                if temperature != 0:
                    accept_prob, _logprob = target_probability(
                        p, x, p_stats.logsumexp, temperature, PROBS
                    )
            tl.store(accept_probs + n, accept_prob.to(tl.float32))
            remaining = tl.where(tokens == x, 0, remaining)
    return tl.where(tl.max(hit, 0) > 0, first_node(hit), -1)


@triton.jit
def typical(
    p, p_stats, children, depth, tree, noise, scratch, typical_params, temperature, accept_probs,
    PROBS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Rule typical -> (the accepted child or -1, the token).

    The likeliest child with P(x) > min(epsilon, delta * exp(-H)) is accepted. The entropy H takes a
    pass over the row, so it is computed only where some child depends on it.
    """
    stats = stats_at(scratch, TARGET_STATS, scratch.tiles)
    inv_t = p.weights.inv_t
    tokens = tree.tokens
    epsilon = typical_params.epsilon
    logprobs = log_probability(
        p.row, tl.maximum(tokens, 0), children > 0, p.direct, temperature, p_stats.logsumexp,
        p_stats.threshold, PROBS,
    )  # fmt: skip
    probs = tl.exp(logprobs)
    bound = epsilon
    doubtful = ((probs > 0) & (probs <= epsilon)).to(tl.int32)
    if tl.max(doubtful, 0) > 0:
        h = entropy(
            p.row, p.v, stats, p_stats.maximum, p_stats.threshold, inv_t, PROBS, TILE, BLOCK,
            LOG_TILES,
        )  # fmt: skip
        bound = tl.minimum(epsilon, typical_params.delta * tl.exp(-h))
    accepted = tl.where(probs > bound, children, 0)
    if accept_probs is not None:
        remaining = children
        while tl.max(remaining, 0) > 0:
            n = first_node(remaining)
            tl.store(accept_probs + n, element(accepted, n).to(tl.float32))
            remaining = tl.where(tokens == element(tokens, n), 0, remaining)
    best = tl.max(tl.where(accepted > 0, probs, -1.0), 0)
    node = flag(-1)
    token = tl.full([], -1, tl.int64)
    if best >= 0:
        node = first_node(tl.where(probs == best, accepted, 0))
        token = element(tokens, node)
    else:
        token = draw_token(
            p.row, p.v, stats, p_stats.maximum, p_stats.threshold, inv_t,
            row_uniform(noise, depth, tree.num_nodes + depth, RESIDUAL), PROBS, TILE, BLOCK,
            LOG_TILES,
        ).to(tl.int64)  # fmt: skip
    return node, token


@triton.jit
def merged_children(members, tree):
    """The mask of the children of several siblings, which count as one because of equal tokens."""
    index = tl.arange(0, tree.tokens.shape[0])
    children = members * 0
    while tl.max(members, 0) > 0:
        m = first_node(members)
        children = tl.maximum(children, children_of(m, tree))
        members = tl.where(index == m, 0, members)
    return children


@triton.jit
def decide_from_root(
    rows, tree, drafts, mode, params, noise, scratch, typical_params, limits, out, v,
    RULE: tl.constexpr, STATS: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Verify one sequence -> (accepted nodes, status)."""
    temperature = params.temperature
    tokens = tree.tokens
    chosen_by_target: tl.constexpr = (
        RULE == GREEDY or RULE == MATCH or RULE == TARGET_ONLY  # noqa: PLR1714  (no `in` in Triton)
    )
    sequential: tl.constexpr = (
        RULE == MULTI_DRAFT or RULE == MULTI_DRAFT_WOR  # noqa: PLR1714
    )
    here = tl.full([], -1, tl.int64)
    children = children_of(flag(-1), tree)
    depth = flag(0)
    flags = flag(0)
    going = flag(1)
    while going > 0:
        going = flag(0)
        p, p_stats, valid = node_target(
            rows.first + (here + 1) * rows.stride, v, params, noise, depth, scratch, STATS, FILTERS,
            PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
        )  # fmt: skip
        if valid > 0:
            children = tl.where(depth < limits.max_depth, children, 0)
            node = flag(-1)
            token = tl.full([], -1, tl.int64)
            more = flag(0)
            if (temperature == 0) | chosen_by_target:
                token = target_token(
                    p, p_stats, depth, temperature, noise, scratch, tree.num_nodes, RULE, PROBS,
                    TILE, BLOCK, LOG_TILES,
                )  # fmt: skip
                node = child_with_token(
                    p, p_stats, token, children, tree, temperature, out.accept_probs, RULE, PROBS
                )
            else:
                if sequential:
                    node, token, more = one_by_one(
                        p, p_stats, children, depth, tree, drafts, mode, params, noise, scratch,
                        out.accept_probs, RULE, PROBS, DRAFT, BEYOND, TILE, CHUNK, BLOCK,
                        LOG_TILES, WIDTH,
                    )  # fmt: skip
                if RULE == TOP_K_PLUS_ONE:
                    node, token, more = top_k_plus_one(
                        p, p_stats, children, depth, tree, drafts, mode, params, noise, scratch,
                        out.accept_probs, RULE, PROBS, DRAFT, BEYOND, TILE, CHUNK, BLOCK,
                        LOG_TILES, WIDTH,
                    )  # fmt: skip
                if RULE == K_SEQ:
                    node, token, more = k_seq(
                        p, p_stats, children, depth, tree, drafts, mode, params, noise, scratch,
                        out.accept_probs, RULE, PROBS, DRAFT, BEYOND, TILE, CHUNK, BLOCK,
                        LOG_TILES, WIDTH,
                    )  # fmt: skip
                if RULE == TYPICAL:
                    node, token = typical(
                        p, p_stats, children, depth, tree, noise, scratch, typical_params,
                        temperature, out.accept_probs, PROBS, TILE, BLOCK, LOG_TILES,
                    )  # fmt: skip
            flags |= more
            tl.store(out.tokens + depth, token.to(out.tokens.dtype.element_ty))
            if out.logprobs is not None:
                logprob = tl.full([], 0.0, tl.float64)
                if temperature != 0:
                    logprob = log_probability(
                        p.row, token, token >= 0, params.direct, temperature, p_stats.logsumexp,
                        p_stats.threshold, PROBS,
                    )  # fmt: skip
                tl.store(out.logprobs + depth, logprob.to(tl.float32))
            if node >= 0:
                tl.store(out.path + depth, node.to(out.path.dtype.element_ty))
                children = merged_children(tl.where(tokens == token, children, 0), tree)
                here = node.to(tl.int64)
                depth += 1
                ended = is_eos(token, limits.eos_token_ids, limits.num_eos)
                going = ((depth < limits.max_new_tokens) & (ended == 0)).to(tl.int32)
        else:
            flags |= flag(TARGET_INVALID)
    return depth, flags
