"""The arguments of the kernels, the scratch that they share, and the begin of a program.

specdec_kernels/ops/verify_chain.py defines the terms of the rules. Terms of the kernels:

valid      A row is valid if it holds a distribution; faults are in the status word.
direct     The rows hold probabilities that are used as they are, without normalisation.
summary    What a decision needs to know of a row: the fields below, float64.
listed     The tokens that a filter leaves are listed in scratch memory, see distribution.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...arguments.rules import RULES
from ..row.distribution import sequence_params
from ..row.draft import SAMPLED
from ..row.noise import uniform
from ..row.status import BAD_PARAMETER, DRAFT_OUT_OF_RANGE, NOTHING_ALLOWED, TARGET_INVALID
from ..row.tile import INF, Row, TileStats, flag, parameter

TOKEN = tl.constexpr(RULES.index("token"))
BLOCK_RULE = tl.constexpr(RULES.index("block"))  # kernels call the width of a scan step BLOCK
GREEDY = tl.constexpr(RULES.index("greedy"))
MATCH = tl.constexpr(RULES.index("match"))
LENIENT = tl.constexpr(RULES.index("lenient"))

# The fields of a summary.
VALID = tl.constexpr(0)
ACCEPTED = tl.constexpr(1)  # whether the draft is accepted where all before it are
ACCEPT_PROB = tl.constexpr(2)  # rule block: P(x) / Q(x)
LOGPROB = tl.constexpr(3)  # of the drafted token, or of the token that the row chooses
CHOSEN = tl.constexpr(4)  # the token that the row chooses: at temperature 0, or by shared noise
MAXIMUM = tl.constexpr(5)
THRESHOLD = tl.constexpr(6)
LOG_SUM = tl.constexpr(7)  # of the weights relative to the maximum
MODE = tl.constexpr(8)  # how its draft enters the residual, see draft.py
DRAFT_MAXIMUM = tl.constexpr(9)
DRAFT_LOG_SUM = tl.constexpr(10)
DRAFT_THRESHOLD = tl.constexpr(11)
LISTED = tl.constexpr(12)  # the number of listed tokens, or -1
P_SCALE = tl.constexpr(13)  # rule block: the scale of P before this row
FIELDS = tl.constexpr(16)

STEP = tl.constexpr(32)  # drafts that one step of a scan over a sequence takes
NEVER = tl.constexpr(0x7FFFFFFF)
WORDS = tl.constexpr(1024)  # tokens whose bits one step of a search reads


class Target(NamedTuple):
    """The target rows of a call."""

    rows: Any
    stride_b: Any  # 0 where the rows are ragged
    stride_i: Any
    v: Any
    allowed: Any  # as in `Row`, of the first row
    words_b: Any  # from one sequence to the next, 0 where the rows are ragged
    words_i: Any  # from one row to the next


TARGET_ROWS = tuple(f"target_{name}" for name in Target._fields[: Target._fields.index("allowed")])


class Call(NamedTuple):
    """The other arguments of a call. Tensors of options that are not used are None."""

    draft_token_ids: Any  # [B, gamma]
    draft_logsumexp: Any
    draft_threshold: Any
    draft_temperatures: Any
    draft_temperature: Any
    target_indptr: Any
    temperatures: Any
    temperature: Any
    top_ks: Any
    top_k: Any
    top_ps: Any
    top_p: Any
    min_ps: Any
    min_p: Any
    seeds: Any
    positions: Any
    uniforms: Any  # given instead of drawn
    lenience: Any  # 1 unless the rule is lenient
    eos_token_ids: Any
    max_new_tokens: Any
    num_eos: Any
    id_limit: Any
    gamma: Any
    n_rows: Any  # of a ragged target


class Scratch(NamedTuple):
    """What one kernel leaves for the next. `row` counts b * (gamma + 1) + i."""

    maxima: Any  # float32 [rows, size]: tile statistics of the target rows, then of the draft rows
    sums: Any  # int64 [rows, size]
    size: Any
    tiles: Any  # of a target row
    d_tiles: Any  # of a draft row
    draft: Any  # the index of the first draft row
    spans: Any  # float32 [rows, SPANS]: the maxima of spans
    reaching: Any  # int32 [rows, SPANS]: those that hold candidates
    ids: Any  # int32 [rows, LIST]: listed tokens
    summaries: Any  # float64 [rows, FIELDS]
    residual_maxima: Any  # float32 [residuals, 4, most]: scales of both parts, maxima of P and Q
    residual_sums: Any  # int64 [residuals, 2, most]
    most: Any  # tiles of a residual


class Outputs(NamedTuple):
    """The outputs of a call; those not asked for are None."""

    tokens: Any
    num_accepted: Any
    status: Any
    logprobs: Any
    accept_probs: Any
    logsumexp: Any
    threshold: Any


@triton.jit
def target_row(target, b, i):
    """Row i of sequence b, or of all sequences where they are ragged."""
    return Row(
        target.rows + b * target.stride_b + i * target.stride_i,
        target.allowed + b * target.words_b + i * target.words_i,
    )  # fmt: skip


@triton.jit
def target_fault(target, b, i):
    """Why row i, which is not valid, holds no distribution."""
    fault = flag(TARGET_INVALID)
    if target.allowed.dtype.element_ty == tl.int32:
        words = target_row(target, b, i).allowed
        found = flag(0)
        for start in range(0, target.v, WORDS):
            ids = start + tl.arange(0, WORDS)
            word = tl.load(words + ids // 32, mask=ids < target.v, other=0)
            found += tl.sum((word >> (ids % 32)) & 1, 0)
        fault = tl.where(found > 0, fault, flag(NOTHING_ALLOWED))
    return fault


@triton.jit
def stats_of(scratch, index, tiles):
    offset = index * scratch.size
    return TileStats(scratch.maxima + offset, scratch.sums + offset, tiles)


@triton.jit
def sequence_rows(call, b):
    """(first row, row count) of sequence b; always inside the target, whatever target_indptr is."""
    if call.target_indptr is None:
        begin = b * 0
        rows = b * 0 + call.gamma + 1
    else:
        begin = tl.load(call.target_indptr + b).to(tl.int64)
        end = tl.load(call.target_indptr + b + 1).to(tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), call.n_rows)
        rows = tl.minimum(tl.maximum(end, begin), call.n_rows) - begin
    return begin, tl.minimum(rows, call.gamma + 1)


@triton.jit
def uniforms_in_range(uniforms, b, columns):
    """Whether all uniforms that the caller gave for sequence b are in [0, 1), which NaN is not.

    Those that no decision would read are checked too, so that the answer does not depend on the
    rule.
    """
    wrong = flag(0)
    if uniforms is not None:
        for start in range(0, columns, STEP):
            index = start + tl.arange(0, STEP)
            u = tl.load(uniforms + b * columns + index, mask=index < columns, other=0.0)
            wrong += tl.sum((((u >= 0) & (u < 1)) == 0).to(tl.int32), 0)
    return wrong == 0


@triton.jit
def open_sequence(call, b, v, RULE: tl.constexpr, DIRECT: tl.constexpr, DRAFT: tl.constexpr):
    """(first row, row count, SequenceParams, the draft's temperature, status before any draft)."""
    begin, rows = sequence_rows(call, b)
    params, good = sequence_params(call, b, v, RULE == GREEDY, DIRECT)
    draft_temperature = params.temperature
    if DRAFT == SAMPLED:  # no other draft has a temperature of its own
        draft_temperature = parameter(call.draft_temperatures, call.draft_temperature, b)
        good = good & (draft_temperature >= 0) & (draft_temperature < INF)
    good = good & uniforms_in_range(call.uniforms, b, call.gamma + 1)
    status = tl.where(good, tl.where(rows > 0, 0, TARGET_INVALID), BAD_PARAMETER).to(tl.int32)
    return begin, rows, params, draft_temperature, status


@triton.jit
def find_drafts(call, rows, b):
    """(number of drafts to verify, no_bonus, status_after_drafts).

    Nothing is emitted after an end-of-sequence token or beyond max_new_tokens. So drafts from there
    on do not count, and `no_bonus` says that no bonus token may follow the last one. The status is
    reported if all drafts are accepted.
    """
    stop = flag(NEVER)
    wrong = flag(NEVER)
    last = flag(NEVER)
    drafts = tl.maximum(rows - 1, 0).to(tl.int32)
    for start in range(0, drafts, STEP):
        index = start + tl.arange(0, STEP)
        x = tl.load(call.draft_token_ids + b * call.gamma + index, mask=index < drafts, other=-1)
        x = x.to(tl.int64)
        bad = (x < -1) | (x >= call.id_limit)
        stop = tl.minimum(stop, tl.min(tl.where((x < 0) | bad, index, NEVER), 0))
        wrong = tl.minimum(wrong, tl.min(tl.where(bad, index, NEVER), 0))
        if call.eos_token_ids is not None:
            for e in range(0, call.num_eos):
                ends = x == tl.load(call.eos_token_ids + e)
                last = tl.minimum(last, tl.min(tl.where(ends, index, NEVER), 0))
    stop = tl.minimum(stop, drafts)
    no_bonus = last < stop
    count = tl.where(no_bonus, last + 1, stop).to(tl.int64)
    out_of_range = (wrong == stop) & (no_bonus == 0)
    if call.max_new_tokens is not None:
        most = tl.maximum(tl.load(call.max_new_tokens + b).to(tl.int64), 0)
        out_of_range = out_of_range & (stop < most)
        no_bonus = no_bonus | (most <= count)
        count = tl.minimum(count, most)
    return count, no_bonus.to(tl.int32), tl.where(out_of_range, DRAFT_OUT_OF_RANGE, 0).to(tl.int32)


@triton.jit
def row_uniform(call, b, i, column, STREAM: tl.constexpr):
    """A uniform that belongs to position + i, or the given one of `column`."""
    if call.uniforms is None:
        seed, position = tl.load(call.seeds + b).to(tl.int64), tl.load(call.positions + b)
        u = uniform(seed, position.to(tl.int64) + i, STREAM)
    else:
        u = tl.load(call.uniforms + b * (call.gamma + 1) + column)
    return u


@triton.jit
def first_rejected(summary, count):
    """The first row whose draft is not accepted; `count` where all drafts are."""
    first = flag(NEVER)
    for start in range(0, count.to(tl.int32), STEP):
        i = start + tl.arange(0, STEP)
        accepted = tl.load(summary + i * FIELDS + ACCEPTED, mask=i < count, other=1.0)
        first = tl.minimum(first, tl.min(tl.where(accepted == 0, i, NEVER), 0))
    return tl.minimum(first.to(tl.int64), count)
