"""The draft's distribution Q at one row: its probability of the drafted token, and its tiles.

A draft may have a vocabulary of its own. Either its columns are ids of tokens, or `columns[v]` is
the column of token v (outside [0, d) if it has none). A sparse draft lists d ids and their
probabilities.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .distribution import MASSES, probabilities, row_stats
from .noise import SHARED
from .tile import INF, as_logits, finite, linear_units, log64

# The form of a draft (DRAFT).
ONE_HOT = tl.constexpr(0)  # deterministic: no rows, all probability is on the drafted token
DRAFT_LOGITS = tl.constexpr(1)  # logits, at the target's temperature
DRAFT_PROBS = tl.constexpr(2)  # probabilities, used as they are
SAMPLED = tl.constexpr(3)  # logits with the logsumexp and the threshold that `sample` returned
SPARSE = tl.constexpr(4)  # probabilities of a few ids

# The mode of a row: the residual subtracts from P
KEEP = tl.constexpr(0)  # nothing: there is no draft, or its row is not valid
REMOVE = tl.constexpr(1)  # the drafted token
SUBTRACT = tl.constexpr(2)  # Q


class Drafts(NamedTuple):
    """The drafts of one sequence. Members that a form does not need are None."""

    rows: Any
    stride_b: Any
    stride_i: Any
    ids: Any  # of a sparse draft
    columns: Any
    d: Any  # entries of a row
    logsumexp: Any  # [gamma]
    threshold: Any  # [gamma]
    temperature: Any
    b: Any
    begin: Any  # the sequence's first row in a ragged target
    gamma: Any
    n_draft: Any  # rows of a ragged draft


class DraftDistribution(NamedTuple):
    """Q of one row."""

    row: Any
    first_id: Any  # where the ids of a sparse row start
    d: Any
    token: Any  # the drafted token
    weights: Any  # WeightParams of a row of logits


@triton.jit
def draft_index(b, i, begin, n_draft, RAGGED_DRAFT: tl.constexpr):
    """(sequence index, row index, whether it exists) of draft i in its tensor.

    A ragged draft [R-B, D] has no row for the last target row of each sequence.
    """
    if RAGGED_DRAFT:
        row = begin - b + i
        there = (row >= 0) & (row < n_draft)
        place = b * 0
    else:
        there = i >= 0
        place = b
        row = i
    return place, row, there


@triton.jit
def draft_row(drafts, i, RAGGED_DRAFT: tl.constexpr):
    """(its row, where its ids start, whether it exists) of draft i."""
    place, row, there = draft_index(drafts.b, i, drafts.begin, drafts.n_draft, RAGGED_DRAFT)
    pointer = drafts.rows + place * drafts.stride_b + row * drafts.stride_i
    return pointer, (place * drafts.gamma + row) * drafts.d, there


@triton.jit
def sparse_entry(row, ids, d, x, WIDTH: tl.constexpr):
    """(Q(x), whether all entries in use are probabilities) of a sparse row."""
    q_x = tl.full([], 0.0, tl.float64)
    wrong = tl.full([], 0, tl.int32)
    for start in range(0, d, WIDTH):
        index = start + tl.arange(0, WIDTH)
        token = tl.load(ids + index, mask=index < d, other=-1).to(tl.int64)
        value = tl.load(row + index, mask=index < d, other=0).to(tl.float64)
        bad = (token >= 0) & (((value >= 0) & (value < INF)) == 0)
        wrong += tl.sum(bad.to(tl.int32), 0)
        q_x += tl.sum(tl.where(token == x, value, 0.0), 0)
    return q_x, wrong == 0


@triton.jit
def row_entry(row, drafts, x, other: tl.constexpr):
    """The entry of token x, float64; `other` where it has no column."""
    column = x
    if drafts.columns is not None:
        column = tl.load(drafts.columns + x).to(tl.int64)
    inside = (column >= 0) & (column < drafts.d)
    return tl.load(row + column, mask=inside, other=other).to(tl.float64)


@triton.jit
def draft_statistics(
    drafts, i, params, stats,
    DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, ROW_PARALLEL: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """(logsumexp, threshold, whether it exists and is valid) of draft row i."""
    row, _first_id, valid = draft_row(drafts, i, RAGGED_DRAFT)
    logsumexp = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], float("-inf"), tl.float32)
    if valid:
        if DRAFT == DRAFT_LOGITS:
            q_stats = row_stats(
                row, drafts.d, stats, params, i, i, SHARED, MASSES, ROW_PARALLEL, False, False,
                TILE, CHUNK, BLOCK, LOG_TILES,
            )  # fmt: skip
            logsumexp = q_stats.logsumexp
            valid = finite(q_stats.maximum)
        elif DRAFT == SAMPLED:
            logsumexp = tl.load(drafts.logsumexp + i)
            threshold = tl.load(drafts.threshold + i)
            valid = (tl.abs(logsumexp) < INF) & (threshold >= -INF)  # not NaN
    return logsumexp, threshold, valid


@triton.jit
def draft_probability(
    drafts, i, x, temperature, logsumexp, threshold, DRAFT: tl.constexpr,
    RAGGED_DRAFT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(Q(x), log Q(x), whether the entries that were read are valid) of a row that exists.

    Where the draft holds logits, only the logarithm is computed and Q(x) is 1.
    """
    row, first_id, valid = draft_row(drafts, i, RAGGED_DRAFT)
    q_x = tl.full([], 1.0, tl.float64)
    log_q_x = tl.full([], 0.0, tl.float64)
    if DRAFT == SPARSE:
        q_x, valid = sparse_entry(row, drafts.ids + first_id, drafts.d, x, WIDTH)
        log_q_x = log64(q_x)
    elif DRAFT == DRAFT_PROBS:
        q_x = row_entry(row, drafts, x, 0.0)
        valid = (q_x >= 0) & (q_x < INF)
        log_q_x = log64(q_x)
    elif DRAFT == DRAFT_LOGITS:
        log_q_x = row_entry(row, drafts, x, float("-inf")) / temperature - logsumexp
    elif DRAFT == SAMPLED:
        entry = row_entry(row, drafts, x, float("-inf"))
        valid = entry < INF
        kept = entry >= threshold.to(tl.float64)
        log_q_x = tl.where(kept, entry / drafts.temperature - logsumexp, -INF)
    return q_x, log_q_x, valid


@triton.jit
def draft_entry(
    drafts, i, x, params, stats,
    DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, ROW_PARALLEL: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(Q(x), log Q(x), logsumexp, threshold, mode) of draft i.

    The mode is KEEP where x is drafted only if the draft's row is not valid.
    """
    q_x = tl.full([], 1.0, tl.float64)
    log_q_x = tl.full([], 0.0, tl.float64)
    logsumexp = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], float("-inf"), tl.float32)
    mode = tl.where(x < 0, KEEP, REMOVE).to(tl.int32)
    if DRAFT != ONE_HOT:  # noqa: SIM102  (compiled in only where there are rows)
        if (x >= 0) & (drafts.temperature != 0):
            logsumexp, threshold, valid = draft_statistics(
                drafts,
                i,
                params,
                stats,
                DRAFT,
                RAGGED_DRAFT,
                ROW_PARALLEL,
                TILE,
                CHUNK,
                BLOCK,
                LOG_TILES,
            )
            if valid:
                q_x, log_q_x, valid = draft_probability(
                    drafts, i, x, params.temperature, logsumexp, threshold, DRAFT, RAGGED_DRAFT,
                    WIDTH,
                )  # fmt: skip
            mode = tl.where(valid, SUBTRACT, KEEP).to(tl.int32)
    return q_x, log_q_x, logsumexp, threshold, mode


@triton.jit
def next_sparse_id(row, ids, d, after, end, WIDTH: tl.constexpr):
    """(the least id in (after, end), its probability); `end` where there is none."""
    least = tl.full([], 0, tl.int64) + end
    for start in range(0, d, WIDTH):
        index = start + tl.arange(0, WIDTH)
        token = tl.load(ids + index, mask=index < d, other=-1).to(tl.int64)
        least = tl.minimum(least, tl.min(tl.where(token > after, token, end), 0))
    q_x, _ = sparse_entry(row, ids, d, least, WIDTH)
    return least, q_x


@triton.jit
def sparse_tile(row, ids, d, tile, mode, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Q of one tile, float32 [TILE]; the loop takes one step for each of the tile's ids."""
    index = tile * TILE + tl.arange(0, TILE)
    q = tl.zeros([TILE], tl.float32)
    after = tl.full([], -1, tl.int64) + tile * TILE
    end = after + TILE + 1
    going = (mode == SUBTRACT).to(tl.int32)
    while going > 0:
        after, value = next_sparse_id(row, ids, d, after, end, WIDTH)
        q = tl.where(index == after, value.to(tl.float32), q)
        going = (after < end).to(tl.int32)
    return q


@triton.jit
def draft_tile(
    q, drafts, tile, v, mode, DRAFT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """(Q of one tile of the target's vocabulary, float32 [TILE]; its maximum, +inf if invalid)."""
    index = tile * TILE + tl.arange(0, TILE)
    removed = tl.where(mode == REMOVE, q.token, -1)
    maximum = tl.full([], 0.0, tl.float32)
    if DRAFT == ONE_HOT:
        probs = tl.where(index == removed, 1.0, 0.0)
    elif DRAFT == SPARSE:
        probs = sparse_tile(q.row, drafts.ids + q.first_id, q.d, tile, mode, TILE, WIDTH)
    else:
        inside = index < tl.where(mode == SUBTRACT, v, 0)
        column = index
        if drafts.columns is not None:
            column = tl.load(drafts.columns + index, mask=inside, other=-1)
        inside = inside & (column >= 0) & (column < q.d)
        probs, maximum = draft_probabilities(q.row + column, inside, q.weights, DRAFT)
        if DRAFT == SAMPLED:  # one-hot at temperature 0
            probs = tl.where(index == removed, 1.0, probs)
    return probs, maximum


@triton.jit
def draft_probabilities(entries, inside, weights, DRAFT: tl.constexpr):
    """(Q at some entries, float32; their maximum)."""
    if DRAFT == DRAFT_PROBS:
        probs = tl.load(entries, mask=inside, other=0.0).to(tl.float32)
        maximum = tl.max(tl.where((probs >= 0) & (probs < INF), probs, INF), 0)
    else:
        logits = tl.load(entries, mask=inside, other=float("-inf")).to(tl.float32)
        logits = as_logits(logits, False)
        maximum = tl.max(logits, 0)
        probs = probabilities(logits, weights)
    return probs, maximum


@triton.jit
def mass_beyond(q, drafts, v, DRAFT: tl.constexpr, TILE: tl.constexpr):
    """(mass of Q on columns that no token of the target has, their maximum).

    With `columns` any column may belong to a token, so the maximum is that of the row and the mass
    is 0.
    """
    first = v
    if drafts.columns is not None:
        first = 0
    mass = tl.full([], 0.0, tl.float64)
    maximum = tl.full([], float("-inf"), tl.float32)
    for t in range(first // TILE, tl.cdiv(q.d, TILE)):
        index = t * TILE + tl.arange(0, TILE)
        inside = (index >= first) & (index < q.d)
        probs, tile_max = draft_probabilities(q.row + index, inside, q.weights, DRAFT)
        maximum = tl.maximum(maximum, tile_max)
        if drafts.columns is None:
            mass += linear_sum(probs)
    return mass, maximum


@triton.jit
def linear_sum(weights):
    """The float64 sum of float32 weights >= 0, added as integers and so in no order."""
    scale, units = linear_units(weights)
    infinite = tl.sum((weights == INF).to(tl.int32), 0)
    total = tl.sum(units, 0).to(tl.float64) * (1.0 / (1 << 48)) * scale.to(tl.float64)
    return tl.where(infinite > 0, INF, total)
