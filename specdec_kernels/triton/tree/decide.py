"""The rules that go from the root of a tree down, a point at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.chain.block import raw_total
from specdec_kernels.triton.chain.decide import number, target_row
from specdec_kernels.triton.chain.rules import TARGET_NOT_FINITE
from specdec_kernels.triton.row.distribution import density_constants, draw, entropy, race
from specdec_kernels.triton.row.philox import RESIDUAL
from specdec_kernels.triton.row.tile import INF, flag, log_probability, row_argmax
from specdec_kernels.triton.tree.k_seq import k_seq
from specdec_kernels.triton.tree.residual import at, first_node
from specdec_kernels.triton.tree.rules import (
    K_SEQ,
    MATCH,
    MULTI_DRAFT,
    MULTI_DRAFT_WOR,
    TARGET_ONLY,
    TOP_K_PLUS_ONE,
    TYPICAL,
)
from specdec_kernels.triton.tree.siblings import one_by_one, target_at, top_k_plus_one


@triton.jit
def point(
    row, v, tiles, tops, sums, shaping, noise, depth, WHAT: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr,
):  # fmt: skip
    """(its p, (top, threshold, logsumexp), whether the row is sound) of a target row."""
    temp, inv_t, _, _, _, _, direct = shaping
    nothing = tl.full([], -1, tl.int64)
    _p_x, top, threshold, logsumexp, alive = target_row(
        row, nothing, v, tiles, tops, sums, shaping, noise, depth, WHAT, False, FILTERS, PROBS,
        TILE, CHUNK, BLOCK, LOG_TILES,
    )  # fmt: skip
    c, r = density_constants(logsumexp, temp)
    p = (row, v, direct, threshold, c, r, inv_t)
    if PROBS:  # noqa: SIM102  (compiled in only where rows hold probabilities)
        if direct:
            _total, high = raw_total(p, tiles, PROBS, TILE)
            alive = ((high > 0) & (high < INF)).to(tl.int32)
    return p, (top, threshold, logsumexp), alive


@triton.jit
def ends(token, eos_token_ids, num_eos):
    """Whether nothing follows a token."""
    hit = flag(0)
    if eos_token_ids is not None:
        for e in range(0, num_eos):
            hit = tl.where(token == tl.load(eos_token_ids + e), 1, hit)
    return hit


@triton.jit
def children_of(node, tree):
    """The mask of them, int32."""
    tokens, parents, _, _ = tree
    return ((parents == node) & (tokens >= 0)).to(tl.int32)


@triton.jit
def answer(
    p, law, depth, temp, noise, scratch, nodes, tiles, RULE: tl.constexpr, PROBS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """The token that the target itself says."""
    row, v, _, _, _, _, inv_t = p
    top, threshold, _logsumexp = law
    tops, sums, _ = scratch
    token = tl.full([], -1, tl.int64)
    if temp == 0:
        token = row_argmax(row, v, tops, tiles, top, PROBS, TILE, BLOCK).to(tl.int64)
    elif RULE == MATCH:
        token = race(tops, sums, tiles, inv_t, TILE, BLOCK).to(tl.int64)
    elif RULE == TARGET_ONLY:
        token = draw(
            row, v, tiles, tops, sums, top, threshold, inv_t,
            number(noise, depth, nodes + depth, RESIDUAL), PROBS, TILE, BLOCK, LOG_TILES,
        ).to(tl.int64)  # fmt: skip
    return token


@triton.jit
def as_answered(
    p, law, token, children, tree, temp, accept_probs, RULE: tl.constexpr, PROBS: tl.constexpr
):
    """The child that is the target's own token, or -1."""
    tokens = tree[0]
    hit = tl.where(tokens == token, children, 0)
    if accept_probs is not None:
        remaining = children
        while tl.max(remaining, 0) > 0:
            n = first_node(remaining)
            x = at(tokens, n)
            chance = tl.where(x == token, 1.0, 0.0).to(tl.float64)
            if RULE == TARGET_ONLY:  # noqa: SIM102  (compiled in for this rule only)
                if temp != 0:
                    chance, _logprob = target_at(p, x, law[2], temp, PROBS)
            tl.store(accept_probs + n, chance.to(tl.float32))
            remaining = tl.where(tokens == x, 0, remaining)
    return tl.where(tl.max(hit, 0) > 0, first_node(hit), -1)


@triton.jit
def typical(
    p, law, children, depth, tree, noise, scratch, judge, accept_probs, tiles, PROBS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Of the children with P(x) > min(epsilon, delta * exp(-H)) the likeliest -> (it or -1, token).

    H is a pass over the row, made where some child needs it.
    """
    row, v, direct, _, _, _, inv_t = p
    top, threshold, logsumexp = law
    tops, sums, _ = scratch
    tokens, _, _, nodes = tree
    epsilon, delta, temp = judge
    logprobs = log_probability(
        row, tl.maximum(tokens, 0), children > 0, direct, temp, logsumexp, threshold, PROBS
    )
    chances = tl.exp(logprobs)
    bound = epsilon
    doubtful = ((chances > 0) & (chances <= epsilon)).to(tl.int32)
    if tl.max(doubtful, 0) > 0:
        h = entropy(row, v, tiles, tops, sums, top, threshold, inv_t, PROBS, TILE, BLOCK, LOG_TILES)
        bound = tl.minimum(epsilon, delta * tl.exp(-h))
    likely = tl.where(chances > bound, children, 0)
    if accept_probs is not None:
        remaining = children
        while tl.max(remaining, 0) > 0:
            n = first_node(remaining)
            tl.store(accept_probs + n, at(likely, n).to(tl.float32))
            remaining = tl.where(tokens == at(tokens, n), 0, remaining)
    best = tl.max(tl.where(likely > 0, chances, -1.0), 0)
    node = flag(-1)
    token = tl.full([], -1, tl.int64)
    if best >= 0:
        node = first_node(tl.where(chances == best, likely, 0))
        token = at(tokens, node)
    else:
        token = draw(
            row, v, tiles, tops, sums, top, threshold, inv_t,
            number(noise, depth, nodes + depth, RESIDUAL), PROBS, TILE, BLOCK, LOG_TILES,
        ).to(tl.int64)  # fmt: skip
    return node, token


@triton.jit
def merged_children(members, tree):
    """The mask of the children of several nodes that are one."""
    tokens = tree[0]
    index = tl.arange(0, tokens.shape[0])
    children = members * 0
    while tl.max(members, 0) > 0:
        m = first_node(members)
        children = tl.maximum(children, children_of(m, tree))
        members = tl.where(index == m, 0, members)
    return children


@triton.jit
def tree_walk(
    rows, tree, drafts, mode, shaping, noise, scratch, entries, judge, limits, out, v, tiles,
    d_tiles,
    RULE: tl.constexpr, WHAT: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, BEYOND: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The verdict on one sequence -> (nodes that stand, status)."""
    row_0, row_stride = rows
    temp, direct = shaping[0], shaping[6]
    tops, sums, _ = scratch
    tokens = tree[0]
    most, max_depth, eos_token_ids, num_eos = limits
    path_out, tokens_out, logprobs_out, accept_probs = out
    siblings: tl.constexpr = (
        RULE == MULTI_DRAFT or RULE == MULTI_DRAFT_WOR  # noqa: PLR1714  (no `in` in Triton)
    )
    here = tl.full([], -1, tl.int64)
    children = children_of(flag(-1), tree)
    depth = flag(0)
    flags = flag(0)
    going = flag(1)
    while going > 0:
        going = flag(0)
        p, law, alive = point(
            row_0 + (here + 1) * row_stride, v, tiles, tops, sums, shaping, noise, depth, WHAT,
            FILTERS, PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
        )  # fmt: skip
        if alive > 0:
            children = tl.where(depth < max_depth, children, 0)
            node = flag(-1)
            token = tl.full([], -1, tl.int64)
            more = flag(0)
            if (temp == 0) | (RULE <= TARGET_ONLY):
                token = answer(
                    p, law, depth, temp, noise, scratch, tree[3], tiles, RULE, PROBS, TILE, BLOCK,
                    LOG_TILES,
                )  # fmt: skip
                node = as_answered(p, law, token, children, tree, temp, accept_probs, RULE, PROBS)
            else:
                if siblings:
                    node, token, more = one_by_one(
                        p, law, children, depth, tree, drafts, mode, shaping, noise, scratch,
                        entries, accept_probs, tiles, d_tiles, RULE, PROBS, DRAFT, BEYOND, TILE,
                        CHUNK, BLOCK, LOG_TILES, WIDTH,
                    )  # fmt: skip
                if RULE == TOP_K_PLUS_ONE:
                    node, token, more = top_k_plus_one(
                        p, law, children, depth, tree, drafts, mode, shaping, noise, scratch,
                        entries, accept_probs, tiles, d_tiles, RULE, PROBS, DRAFT, BEYOND, TILE,
                        CHUNK, BLOCK, LOG_TILES, WIDTH,
                    )  # fmt: skip
                if RULE == K_SEQ:
                    node, token, more = k_seq(
                        p, law, children, depth, tree, drafts, mode, shaping, noise, scratch,
                        entries, accept_probs, tiles, d_tiles, RULE, PROBS, DRAFT, BEYOND, TILE,
                        CHUNK, BLOCK, LOG_TILES, WIDTH,
                    )  # fmt: skip
                if RULE == TYPICAL:
                    node, token = typical(
                        p, law, children, depth, tree, noise, scratch, judge, accept_probs, tiles,
                        PROBS, TILE, BLOCK, LOG_TILES,
                    )  # fmt: skip
            flags |= more
            tl.store(tokens_out + depth, token.to(tokens_out.dtype.element_ty))
            if logprobs_out is not None:
                logprob = tl.full([], 0.0, tl.float64)
                if temp != 0:
                    logprob = log_probability(
                        p[0], token, token >= 0, direct, temp, law[2], law[1], PROBS
                    )
                tl.store(logprobs_out + depth, logprob.to(tl.float32))
            if node >= 0:
                tl.store(path_out + depth, node.to(path_out.dtype.element_ty))
                children = merged_children(tl.where(tokens == token, children, 0), tree)
                here = node.to(tl.int64)
                depth += 1
                going = ((depth < most) & (ends(token, eos_token_ids, num_eos) == 0)).to(tl.int32)
        else:
            flags |= flag(TARGET_NOT_FINITE)
    return depth, flags
