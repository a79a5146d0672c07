"""The draft's distribution Q at one row: its probability of the drafted token, and of any others.

A draft may have a vocabulary of its own. Either its columns are ids of tokens, or `columns[v]` is
the column of token v (outside [0, d) if it has none). A sparse draft lists d ids and their
probabilities.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .distribution import WeightParams, probabilities
from .tile import INF, Row, as_logits, load_entries, log64

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


class Draft(NamedTuple):
    """The draft of a call. Members that a form does not need are None."""

    rows: Any
    stride_b: Any  # 0, as `rows_b`, if the sequences share one list of rows
    stride_i: Any
    d: Any  # entries of a row
    ids: Any  # of a sparse draft
    columns: Any
    allowed: Any  # as in `Row`, of the first row
    words_b: Any  # from one sequence to the next, 0 as `stride_b`
    words_i: Any  # from one row to the next
    chosen: Any = None  # [B, gamma], the row of each draft
    m: Any = 0  # rows of a list
    rows_b: Any = 0  # rows from one sequence to the next
    ragged: Any = 0  # 1 if the list is [R-B, D], which has no row for the last target row of each


# Of a kernel's argument `draft`, what it is compiled anew for; see `launch.kernel`. A bitmask is
# read a word at a time, which no alignment makes faster.
DRAFT_ROWS = tuple(f"draft_{name}" for name in Draft._fields[: Draft._fields.index("allowed")])


class DraftDistribution(NamedTuple):
    """Q of one row."""

    row: Row
    place: Any  # of the row among all rows
    mode: Any
    token: Any  # the drafted token
    weights: WeightParams  # of a row of logits


@triton.jit
def draft_row(draft, b, i, begin, gamma):
    """(its row, its place among all rows, whether it exists) of draft i of sequence b."""
    row = i + draft.ragged * (begin - b)
    if draft.chosen is not None:
        row = tl.load(draft.chosen + b * gamma + i, mask=i < gamma, other=-1).to(tl.int64)
    there = (row >= 0) & (row < draft.m)
    entries = draft.rows + b * draft.stride_b + row * draft.stride_i
    words = draft.allowed + b * draft.words_b + row * draft.words_i
    return Row(entries, words), b * draft.rows_b + row, there


@triton.jit
def sparse_entry(row, ids, d, x):
    """(Q(x), whether all entries in use are probabilities) of a sparse row."""
    q_x = tl.full([], 0.0, tl.float64)
    wrong = tl.full([], 0, tl.int32)
    for start in range(0, d, 64):
        index = start + tl.arange(0, 64)
        token = tl.load(ids + index, mask=index < d, other=-1).to(tl.int64)
        value = tl.load(row.entries + index, mask=index < d, other=0).to(tl.float64)
        bad = (token >= 0) & (((value >= 0) & (value < INF)) == 0)
        wrong += tl.sum(bad.to(tl.int32), 0)
        q_x += tl.sum(tl.where(token == x, value, 0.0), 0)
    return q_x, wrong == 0


@triton.jit
def row_entry(draft, row, x, v, other: tl.constexpr):
    """The entry of token x, float64; `other` where it has no column."""
    column = x
    if draft.columns is not None:
        column = tl.load(draft.columns + x, mask=x < v, other=-1).to(tl.int64)
    inside = (column >= 0) & (column < draft.d)
    return load_entries(row, column, inside, other).to(tl.float64)


@triton.jit
def draft_probability(
    draft, row, place, x, v, temperature, maximum, log_sum, threshold, DRAFT: tl.constexpr
):
    """(Q(x), log Q(x), whether the entries that were read are valid) of a row that exists.

    Where the draft holds logits, only the logarithm is computed and Q(x) is 1.
    """
    q_x = tl.full([], 1.0, tl.float64)
    log_q_x = tl.full([], 0.0, tl.float64)
    valid = x >= 0
    if DRAFT == SPARSE:
        q_x, valid = sparse_entry(row, draft.ids + place * draft.d, draft.d, x)
        log_q_x = log64(q_x)
    elif DRAFT == DRAFT_PROBS:
        q_x = row_entry(draft, row, x, v, 0.0)
        valid = (q_x >= 0) & (q_x < INF)
        log_q_x = log64(q_x)
    elif DRAFT == DRAFT_LOGITS:
        entry = row_entry(draft, row, x, v, float("-inf"))
        log_q_x = (entry - maximum.to(tl.float64)) / temperature - log_sum
    elif DRAFT == SAMPLED:
        entry = row_entry(draft, row, x, v, float("-inf"))
        valid = entry < INF
        kept = entry >= threshold.to(tl.float64)
        log_q = (entry - maximum.to(tl.float64)) / temperature - log_sum
        log_q_x = tl.where(kept, log_q, -INF)
    return q_x, log_q_x, valid


@triton.jit
def sparse_probs(row, ids, d, tokens):
    """Q of some tokens, float32; probabilities of an id that occurs twice are added."""
    q = tl.zeros(tokens.shape, tl.float64)
    for j in range(0, d):
        value = tl.load(row.entries + j).to(tl.float64)
        q += tl.where(tokens == tl.load(ids + j).to(tl.int32), value, 0.0)
    return q.to(tl.float32)


@triton.jit
def column_probs(q, columns, inside, DRAFT: tl.constexpr):
    """(Q at some columns, float32; their maximum, +inf where an entry is not valid)."""
    if DRAFT == DRAFT_PROBS:
        probs = load_entries(q.row, columns, inside, 0.0).to(tl.float32)
        maximum = tl.max(tl.where((probs >= 0) & (probs < INF), probs, INF), 0)
    else:
        raw = load_entries(q.row, columns, inside, float("-inf")).to(tl.float32)
        logits = as_logits(raw, False)
        maximum = tl.max(logits, 0)
        probs = probabilities(logits, q.weights)
    return probs, maximum


@triton.jit
def draft_probs(q, draft, tokens, v, DRAFT: tl.constexpr):
    """(Q of some tokens, float32; their maximum, +inf where an entry is not valid)."""
    removed = tl.where(q.mode == REMOVE, q.token, -1)
    maximum = tl.full([], 0.0, tl.float32)
    if DRAFT == ONE_HOT:
        probs = tl.where(tokens == removed, 1.0, 0.0)
    elif DRAFT == SPARSE:
        used = tl.where(q.mode == SUBTRACT, draft.d, 0)
        probs = sparse_probs(q.row, draft.ids + q.place * draft.d, used, tokens)
    else:
        columns = tokens
        inside = tokens < tl.where(q.mode == SUBTRACT, draft.d, 0)
        if draft.columns is not None:
            inside = tokens < tl.where(q.mode == SUBTRACT, v, 0)
            columns = tl.load(draft.columns + tokens, mask=inside, other=-1)
            inside = inside & (columns >= 0) & (columns < draft.d)
        probs, maximum = column_probs(q, columns, inside, DRAFT)
        if DRAFT == SAMPLED:  # one-hot at temperature 0
            probs = tl.where(tokens == removed, 1.0, probs)
    return probs, maximum
