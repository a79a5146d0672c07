"""The plan of a launch and the begin of a program, for `verify_chain` and `verify_tree`.

specdec_kernels/ops/verify_chain.py defines the terms of the rules. Terms of the kernels:

valid                A row is valid if it holds a distribution; faults are in the status word.
direct               The rows hold probabilities that are used as they are, without normalisation.
tile statistics      See row/tile.py. The op's scratch has room for those of each row that a program
                     may need at a time: target rows, draft rows and a residual.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...arguments.checks import float32
from ...arguments.verification import VerifyArguments
from .. import launch
from ..row.distribution import (
    GUMBEL,
    MASSES,
    MAXIMA,
    WeightParams,
    sequence_params,
)
from ..row.draft import DRAFT_LOGITS, DRAFT_PROBS, ONE_HOT, SAMPLED, SPARSE
from ..row.noise import uniform
from ..row.status import BAD_PARAMETER, TARGET_INVALID
from ..row.tile import INF, flag, parameter

UNIFORMS = tl.constexpr(32)  # of the caller's, checked in one step


class Noise(NamedTuple):
    """Where the random numbers of one sequence come from."""

    seed: Any
    position: Any
    uniforms: Any  # given instead of drawn; may be None


class TargetRows(NamedTuple):
    """The target rows of one sequence."""

    first: Any
    stride: Any


class TargetDistribution(NamedTuple):
    """P of one row."""

    row: Any
    v: Any
    direct: Any
    weights: WeightParams


@triton.jit
def sequence_rows(target_indptr, b, gamma, n_rows):
    """(first row, row count) of sequence b; always inside the target, whatever target_indptr is."""
    if target_indptr is None:
        begin = b * 0
        rows = b * 0 + gamma + 1
    else:
        begin = tl.load(target_indptr + b).to(tl.int64)
        end = tl.load(target_indptr + b + 1).to(tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), n_rows)
        rows = tl.minimum(tl.maximum(end, begin), n_rows) - begin
    return begin, tl.minimum(rows, gamma + 1)


@triton.jit
def uniforms_in_range(uniforms, b, columns):
    """Whether all uniforms that the caller gave for sequence b are in [0, 1), which NaN is not.

    Those that no decision would read are checked too, so that the answer does not depend on the
    rule.
    """
    wrong = flag(0)
    if uniforms is not None:
        for start in range(0, columns, UNIFORMS):
            index = start + tl.arange(0, UNIFORMS)
            u = tl.load(uniforms + b * columns + index, mask=index < columns, other=0.0)
            wrong += tl.sum((((u >= 0) & (u < 1)) == 0).to(tl.int32), 0)
    return wrong == 0


@triton.jit
def verification_params(
    sampling, draft_temperatures, draft_temperature, b, v, rows, uniforms, columns,
    GREEDY: tl.constexpr, READS_DRAFT: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """(SequenceParams, the draft's temperature, status before any draft is looked at).

    Rules that compare P with Q (READS_DRAFT) use probabilities without filters or temperature as
    they are, and read one entry of each accepted row.
    """
    direct: tl.constexpr = PROBS and READS_DRAFT
    params, good = sequence_params(sampling, b, v, GREEDY, direct)
    if DRAFT == SAMPLED:  # no other draft has a temperature of its own
        draft_temperature = parameter(draft_temperatures, draft_temperature, b)
        good = good & (draft_temperature >= 0) & (draft_temperature < INF)
    else:
        draft_temperature = params.temperature
    good = good & uniforms_in_range(uniforms, b, columns)
    flags = tl.where(good, tl.where(rows > 0, 0, TARGET_INVALID), BAD_PARAMETER).to(tl.int32)
    return params, draft_temperature, flags


@triton.jit
def row_uniform(noise, i, column, STREAM: tl.constexpr):
    """A uniform that belongs to position + i, or the given one of `column`."""
    if noise.uniforms is None:
        u = uniform(noise.seed, noise.position + i, STREAM)
    else:
        u = tl.load(noise.uniforms + column)
    return u


# What a kernel reads as rows, see `launch.kernel`.
ROW_ARGUMENTS = (
    *("target", "target_stride_b", "target_stride_i", "v"),
    *("draft", "draft_stride_b", "draft_stride_i", "d"),
)


class Rows(NamedTuple):
    """Rows [B, I, V] or ragged [R, V] as a kernel takes them."""

    rows: Tensor
    stride_b: int  # 0 where the rows are ragged
    stride_i: int


class Plan(NamedTuple):
    """The arguments of a launch, apart from the drafted tokens or nodes.

    draft: without a draft it is the target and is not read.
    draft_arguments: the other arguments of the draft, in the order of a kernel.
    """

    form: int
    target: Rows
    draft: Rows
    draft_arguments: tuple[Any, ...]
    filters: launch.Filters
    shape: launch.Tiling
    most: launch.Tiling  # of the longer of a target and a draft row
    d_tiles: int  # 0 where a draft row needs no statistics
    stats_size: int  # entries that the tile statistics of one row take
    n_rows: int
    num_eos: int
    options: dict[str, Any]


def plan(a: VerifyArguments) -> Plan:
    target, v = a.target, a.target.shape[-1]
    draft, form = a.draft, DRAFT_LOGITS.value
    draft_arguments: tuple[Tensor | None, ...] = (
        a.draft_ids, a.draft_columns, a.draft_logsumexp, a.draft_threshold, a.draft_temperatures,
    )  # fmt: skip
    if not a.reads_draft or draft is None:
        draft, draft_arguments, form = target, (None,) * 5, ONE_HOT.value
    elif a.draft_ids is not None:
        form = SPARSE.value
    elif a.draft_logsumexp is not None:
        form = SAMPLED.value
    elif a.kind_name == "probs":
        form = DRAFT_PROBS.value
    logits, d = form == DRAFT_LOGITS.value, draft.shape[-1]
    own_columns = a.draft_columns is not None
    scanned = logits or form in (DRAFT_PROBS.value, SAMPLED.value)
    filters = launch.filters(v, a)
    shape = launch.tiling(v)
    d_tiles = launch.tiling(d).tiles if logits else 0
    most = launch.tiling(max(v, d)) if logits else shape
    options = {
        "STATS": {"match": GUMBEL, "greedy": MAXIMA}.get(a.rule_name, MASSES).value,
        "PROBS": a.kind_name == "probs",
        "READS_DRAFT": a.reads_draft, "FILTERS": a.rule_name != "greedy" and launch.filtering(v,
        filters), "DRAFT": form, "BEYOND": scanned and (not logits if own_columns else d > v),
        "TILE": launch.TILE, "CHUNK": launch.CHUNK, "BLOCK": most.block,
        "LOG_TILES": most.log_tiles, "WIDTH": launch.width(d) if form == SPARSE.value else 16,
        **launch.OPTIONS,
    }  # fmt: skip
    return Plan(
        form,
        Rows(target, 0 if a.target_indptr is not None else target.stride(0), target.stride(-2)),
        Rows(draft, 0 if draft.dim() == 2 else draft.stride(0), draft.stride(-2)),
        (*launch.packed(*draft_arguments), float32(a.draft_temperature)),
        filters,
        shape,
        most,
        d_tiles,
        most.tiles * (2 if a.rule_name == "match" else 1),
        target.shape[:-1].numel(),
        0 if a.eos_token_ids is None else len(a.eos_token_ids),
        options,
    )
