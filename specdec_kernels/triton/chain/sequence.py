"""What `verify_chain` and `verify_tree` begin with alike, on the host and in a program."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.checks import float32
from specdec_kernels.arguments.tree import TreeArguments
from specdec_kernels.triton import launch
from specdec_kernels.triton.chain.rules import BAD_PARAMETER, TARGET_NOT_FINITE
from specdec_kernels.triton.row.distribution import MASS, RACE, TOPS
from specdec_kernels.triton.row.draft import LAW, POINT, RAW, SAMPLED, SPARSE
from specdec_kernels.triton.row.tile import INF, count_parameter, inverse, parameter, valid


@triton.jit
def sequence(target_indptr, b, gamma, n_rows):
    """(first row, row count) of sequence b, inside the target whatever target_indptr holds."""
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
def shaping_of(
    sampling, draft_temperatures, draft_temperature, b, v, rows,
    GREEDY: tl.constexpr, COMPARES: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
):  # fmt: skip
    """(what shapes the target's law, the draft's temperature, status before anything is judged)."""
    temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p = sampling
    temp = parameter(temperatures, temperature, b)
    k = count_parameter(top_ks, top_k, b)
    p = parameter(top_ps, top_p, b)
    least = parameter(min_ps, min_p, b)
    good = valid(temp, k, p, least)
    shaped = ((k > 0) & (k < v)) | (p < 1) | (least > 0)
    if GREEDY:
        temp = tl.full([], 0.0, tl.float64)
    # Probabilities that need no shaping are the law itself to the rules that read Q; the ratio test
    # then reads one entry of each accepted row.
    direct = (temp == 1) & (shaped == 0) & (PROBS and COMPARES)
    # Only a SampledDraft has a temperature of its own.
    q_temp = temp
    if DRAFT == SAMPLED:
        q_temp = parameter(draft_temperatures, draft_temperature, b)
        good = good & (q_temp >= 0) & (q_temp < INF)
    flags = tl.where(good, tl.where(rows > 0, 0, TARGET_NOT_FINITE), BAD_PARAMETER).to(tl.int32)
    return (temp, inverse(temp), k, p, least, shaped & (temp > 0), direct), q_temp, flags


class Plan(NamedTuple):
    """What a launch is made of, but for the nodes or drafts.

    target, draft: rows and both strides; without a draft the target's, which are not read as one.
    laws: the other arguments that say what the draft is, as a kernel takes them.
    """

    form: int
    target: tuple[Tensor, int, int]
    draft: tuple[Tensor, int, int]
    laws: tuple[Any, ...]
    filters: tuple[Any, ...]
    shape: launch.Tiling
    most: launch.Tiling  # of the longer rows
    d_tiles: int  # 0 where a draft row needs no statistics
    slot_size: int
    n_rows: int
    num_eos: int
    options: dict[str, Any]


def plan(a: ChainArguments | TreeArguments) -> Plan:
    target, v = a.target, a.target.shape[-1]
    draft, laws, form = a.draft, a.draft_source[1:6], LAW.value
    if not a.reads_draft or draft is None:
        draft, laws, form = target, (None,) * 5, POINT.value
    elif a.draft_ids is not None:
        form = SPARSE.value
    elif a.draft_logsumexp is not None:
        form = SAMPLED.value
    elif a.kind == "probs":
        form = RAW.value
    law, d, own_columns = form == LAW.value, draft.shape[-1], laws[1] is not None
    scanned = law or form in (RAW.value, SAMPLED.value)
    filters = launch.filters(v, a.sampling)
    shape = launch.tiling(v)
    d_tiles = launch.tiling(d).tiles if law else 0
    most = launch.tiling(max(v, d)) if law else shape
    options = {
        "WHAT": {"match": RACE, "greedy": TOPS}.get(a.rule, MASS).value, "PROBS": a.kind == "probs",
        "FILTERS": a.rule != "greedy" and launch.filtering(v, filters), "DRAFT": form,
        "BEYOND": scanned and (not law if own_columns else d > v),
        "TILE": launch.TILE, "CHUNK": launch.CHUNK, "BLOCK": most.block,
        "LOG_TILES": most.log_tiles, "WIDTH": launch.width(d) if form == SPARSE.value else 16,
        **launch.OPTIONS,
    }  # fmt: skip
    return Plan(
        form,
        (target, 0 if a.target_indptr is not None else target.stride(0), target.stride(-2)),
        (draft, 0 if draft.dim() == 2 else draft.stride(0), draft.stride(-2)),
        (*launch.packed(*laws), float32(a.draft_temperature)),
        filters,
        shape,
        most,
        d_tiles,
        most.tiles * (2 if a.rule == "match" else 1),
        target.shape[:-1].numel(),
        0 if a.eos_token_ids is None else len(a.eos_token_ids),
        options,
    )
