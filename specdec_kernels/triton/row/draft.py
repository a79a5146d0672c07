"""The draft's law at one row: its probability of the drafted token, and its tiles.

A draft row is the tuple q = (row, first, d, x, threshold, c, r, inv_t): d entries at `row`, the
drafted token x, and what `density` needs of a law in logits. Which tokens the entries are of is in
keys = (ids, columns), None where not given: a sparse draft has its d ids at ids + first, and of
others token v stands in column columns[v], or v; a column outside [0, d) is no column. Both are
the same for all rows, and apart from q because a function cannot return a None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.triton.row.distribution import MASS, density, row_law
from specdec_kernels.triton.row.philox import SHARED
from specdec_kernels.triton.row.tile import INF, as_logits, finite, linear_units, log64

# What a draft is.
POINT = tl.constexpr(0)  # a point mass at the drafted token
LAW = tl.constexpr(1)  # logits, at the target's temperature
RAW = tl.constexpr(2)  # probabilities, used as they are
SAMPLED = tl.constexpr(3)  # logits with the logsumexp and threshold that `sample` left
SPARSE = tl.constexpr(4)  # probabilities of a few ids

# What to take off P at one row: nothing, the drafted token, a draft row.
KEEP = tl.constexpr(0)
REMOVE = tl.constexpr(1)
SUBTRACT = tl.constexpr(2)


@triton.jit
def draft_index(b, i, begin, n_draft, RAGGED_DRAFT: tl.constexpr):
    """(sequence index, row index, whether it exists) of draft i in its tensor.

    A ragged draft [N-B, D] has no row for the last target row of each sequence.
    """
    if RAGGED_DRAFT:
        at = begin - b + i
        there = (at >= 0) & (at < n_draft)
        place = b * 0
    else:
        there = i >= 0
        place = b
        at = i
    return place, at, there


@triton.jit
def draft_row(drafts, i, RAGGED_DRAFT: tl.constexpr):
    """(its row, where its ids start, whether it exists) of draft i."""
    draft, stride_b, stride_i, _, d, _, _, _, b, begin, gamma, n_draft = drafts
    place, at, there = draft_index(b, i, begin, n_draft, RAGGED_DRAFT)
    return draft + place * stride_b + at * stride_i, (place * gamma + at) * d, there


@triton.jit
def sparse_entry(row, ids, d, x, WIDTH: tl.constexpr):
    """(Q(x), whether all entries in use are probabilities)."""
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
def row_entry(row, d, columns, x, other: tl.constexpr):
    """The entry of token x, float64; `other` where it has no column."""
    column = x
    if columns is not None:
        column = tl.load(columns + x).to(tl.int64)
    inside = (column >= 0) & (column < d)
    return tl.load(row + column, mask=inside, other=other).to(tl.float64)


@triton.jit
def draft_statistics(
    drafts, i, temp, inv_t, tops, sums, d_tiles,
    DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, PRE: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """(logsumexp, threshold, whether it is there and has a law) of draft row i."""
    _, _, _, _, d, logsumexps, thresholds, _, _, _, _, _ = drafts
    row, _first, sound = draft_row(drafts, i, RAGGED_DRAFT)
    logsumexp = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], float("-inf"), tl.float32)
    if sound:
        if DRAFT == LAW:
            q_top, _cut, logsumexp = row_law(
                row, d, d_tiles, tops, sums, temp, inv_t, 0, 1.0, 0.0, False, i, i, SHARED, MASS,
                PRE, False, False, TILE, CHUNK, BLOCK, LOG_TILES,
            )  # fmt: skip
            sound = finite(q_top)
        elif DRAFT == SAMPLED:
            logsumexp = tl.load(logsumexps + i)
            threshold = tl.load(thresholds + i)
            sound = (tl.abs(logsumexp) < INF) & (threshold >= -INF)  # not NaN
    return logsumexp, threshold, sound


@triton.jit
def draft_probability(
    drafts, i, x, temp, logsumexp, threshold, DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """(Q(x), log Q(x), whether what was read is what it may be) of a draft row that is there.

    Of a law in logits Q(x) is left out, and 1.
    """
    _, _, _, keys, d, _, _, q_temp, _, _, _, _ = drafts
    ids, columns = keys
    row, first, sound = draft_row(drafts, i, RAGGED_DRAFT)
    q_x = tl.full([], 1.0, tl.float64)
    log_q_x = tl.full([], 0.0, tl.float64)
    if DRAFT == SPARSE:
        q_x, sound = sparse_entry(row, ids + first, d, x, WIDTH)
        log_q_x = log64(q_x)
    elif DRAFT == RAW:
        q_x = row_entry(row, d, columns, x, 0.0)
        sound = (q_x >= 0) & (q_x < INF)
        log_q_x = log64(q_x)
    elif DRAFT == LAW:
        log_q_x = row_entry(row, d, columns, x, float("-inf")) / temp - logsumexp
    elif DRAFT == SAMPLED:
        entry = row_entry(row, d, columns, x, float("-inf"))
        sound = entry < INF
        log_q_x = tl.where(entry >= threshold.to(tl.float64), entry / q_temp - logsumexp, -INF)
    return q_x, log_q_x, sound


@triton.jit
def draft_entry(
    drafts, i, x, temp, inv_t, tops, sums, d_tiles,
    DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, PRE: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(Q(x), log Q(x), logsumexp, threshold, what to take off P) of draft i.

    KEEP for a drafted x says that its row holds what it may not.
    """
    q_x = tl.full([], 1.0, tl.float64)
    log_q_x = tl.full([], 0.0, tl.float64)
    logsumexp = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], float("-inf"), tl.float32)
    mode = tl.where(x < 0, KEEP, REMOVE).to(tl.int32)
    if DRAFT != POINT:  # noqa: SIM102  (compiled in only where there are rows)
        if (x >= 0) & (drafts[7] != 0):
            logsumexp, threshold, sound = draft_statistics(
                drafts, i, temp, inv_t, tops, sums, d_tiles, DRAFT, RAGGED_DRAFT, PRE, TILE, CHUNK,
                BLOCK, LOG_TILES,
            )  # fmt: skip
            if sound:
                q_x, log_q_x, sound = draft_probability(
                    drafts, i, x, temp, logsumexp, threshold, DRAFT, RAGGED_DRAFT, WIDTH
                )
            mode = tl.where(sound, SUBTRACT, KEEP).to(tl.int32)
    return q_x, log_q_x, logsumexp, threshold, mode


@triton.jit
def next_token(row, ids, d, after, end, WIDTH: tl.constexpr):
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
    """Q of one tile, float32 [TILE]: a step for each of its tokens."""
    index = tile * TILE + tl.arange(0, TILE)
    q = tl.zeros([TILE], tl.float32)
    after = tl.full([], -1, tl.int64) + tile * TILE
    end = after + TILE + 1
    going = (mode == SUBTRACT).to(tl.int32)
    while going > 0:
        after, value = next_token(row, ids, d, after, end, WIDTH)
        q = tl.where(index == after, value.to(tl.float32), q)
        going = (after < end).to(tl.int32)
    return q


@triton.jit
def draft_tile(
    q, keys, tile, v, mode, DRAFT: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    """(Q of one tile of the target's vocabulary, float32 [TILE]; its top, +inf if bad)."""
    row, first, d, x, threshold, c, r, inv_t = q
    ids, columns = keys
    index = tile * TILE + tl.arange(0, TILE)
    gone = tl.where(mode == REMOVE, x, -1)
    top = tl.full([], 0.0, tl.float32)
    if DRAFT == POINT:
        law = tl.where(index == gone, 1.0, 0.0)
    elif DRAFT == SPARSE:
        law = sparse_tile(row, ids + first, d, tile, mode, TILE, WIDTH)
    else:
        inside = index < tl.where(mode == SUBTRACT, v, 0)
        column = index
        if columns is not None:
            column = tl.load(columns + index, mask=inside, other=-1)
        inside = inside & (column >= 0) & (column < d)
        law, top = density_of(row + column, inside, threshold, c, r, inv_t, DRAFT)
        if DRAFT == SAMPLED:  # a point mass at temperature 0
            law = tl.where(index == gone, 1.0, law)
    return law, top


@triton.jit
def density_of(entries, inside, threshold, c, r, inv_t, DRAFT: tl.constexpr):
    """(law at some entries, float32; their top)."""
    if DRAFT == RAW:
        law = tl.load(entries, mask=inside, other=0.0).to(tl.float32)
        top = tl.max(tl.where((law >= 0) & (law < INF), law, INF), 0)
    else:
        logits = tl.load(entries, mask=inside, other=float("-inf")).to(tl.float32)
        logits = as_logits(logits, False)
        top = tl.max(logits, 0)
        law = density(logits, threshold, c, r, inv_t)
    return law, top


@triton.jit
def draft_beyond(q, keys, v, DRAFT: tl.constexpr, TILE: tl.constexpr):
    """(mass of the columns that no token of the target has, their top).

    With `columns` a token may stand anywhere: the top is that of the row, and the mass is none.
    """
    row, _, d, _, threshold, c, r, inv_t = q
    columns = keys[1]
    first = v
    if columns is not None:
        first = 0
    mass = tl.full([], 0.0, tl.float64)
    top = tl.full([], float("-inf"), tl.float32)
    for t in range(first // TILE, tl.cdiv(d, TILE)):
        index = t * TILE + tl.arange(0, TILE)
        inside = (index >= first) & (index < d)
        law, tile_top = density_of(row + index, inside, threshold, c, r, inv_t, DRAFT)
        top = tl.maximum(top, tile_top)
        if columns is None:
            mass += linear_sum(law)
    return mass, top


@triton.jit
def linear_sum(weights):
    """Sum of float32 weights >= 0, float64: of integers, so in no order."""
    scale, units = linear_units(weights)
    return tl.sum(units, 0).to(tl.float64) * (1.0 / (1 << 48)) * scale.to(tl.float64)
