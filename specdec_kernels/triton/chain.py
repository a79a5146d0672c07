"""`specdec_kernels::verify_chain` in Triton.

One program a sequence walks its rows to the first rejection. For small batches a grid over (tile,
row, sequence) first fills the slots of all rows (`chain_tiles`), and the same walk reads them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels import _checks
from specdec_kernels._chain_arguments import ChainArguments
from specdec_kernels.triton import launch
from specdec_kernels.triton.law import (
    MASS,
    RACE,
    TOPS,
    density_constants,
    draw,
    race,
    row_law,
    store_tile,
)
from specdec_kernels.triton.philox import ACCEPT, RESIDUAL, SHARED, uniform
from specdec_kernels.triton.residual import (
    KEEP,
    LAW,
    POINT,
    RAW,
    REMOVE,
    SAMPLED,
    SUBTRACT,
    draw_residual,
    fill_residual,
)
from specdec_kernels.triton.row import (
    INF,
    as_logits,
    count_parameter,
    finite,
    inverse,
    parameter,
    row_argmax,
    row_top,
    row_total,
    valid,
)

TARGET_NOT_FINITE = tl.constexpr(1)
DRAFT_NOT_FINITE = tl.constexpr(2)
EMPTY_RESIDUAL = tl.constexpr(4)
DRAFT_OUT_OF_RANGE = tl.constexpr(8)
BAD_PARAMETER = tl.constexpr(16)


@triton.jit
def sequence(cu_rows, b, gamma, n_rows):
    """(first row, row count) of sequence b, inside the target whatever cu_rows holds."""
    if cu_rows is None:
        begin = b * 0
        rows = b * 0 + gamma + 1
    else:
        begin = tl.load(cu_rows + b).to(tl.int64)
        end = tl.load(cu_rows + b + 1).to(tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), n_rows)
        rows = tl.minimum(tl.maximum(end, begin), n_rows) - begin
    return begin, rows


@triton.jit
def draft_index(b, i, begin, n_draft, RAGGED_DRAFT: tl.constexpr):
    """(sequence index, row index, whether it exists) of draft i in its tensor.

    A ragged draft [N-B, V] has no row for the last target row of each sequence.
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
def log64(x):
    """log of a float64 scalar >= 0."""
    return tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), -INF)


@triton.jit
def log_probability(row, token, direct, temperature, logsumexp, threshold, PROBS: tl.constexpr):
    """log P of one token, float64."""
    raw = tl.load(row + token).to(tl.float32)
    logit = as_logits(raw, PROBS)
    exact = logit.to(tl.float64)
    if PROBS:
        # A shaped law was computed from float32 logarithms: its own rounding must cancel.
        exact = tl.where(direct, log64(raw.to(tl.float64)), exact)
    return tl.where(logit >= threshold, exact / temperature - logsumexp, -INF)


@triton.jit(do_not_specialize=["gamma", "n_rows", "n_draft", "tiles", "draft_slots"])
def chain_tiles(
    target, target_stride_b, target_stride_i, draft, draft_stride_b, draft_stride_i,
    cu_rows, temperatures, temperature, seeds, positions,
    tops, sums,
    gamma, v, n_rows, n_draft, tiles, draft_slots,
    WHAT: tl.constexpr, PLANES: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
    RAGGED_DRAFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, gamma + 1, B): one tile of one target row, and of its draft row."""
    tile = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    begin, rows = sequence(cu_rows, b, gamma, n_rows)
    inv_t = inverse(parameter(temperatures, temperature, b))
    seed = tl.load(seeds + b)
    position = tl.load(positions + b) + i
    slot = b * (gamma + 1) + i
    if i < rows:
        at = slot * tiles * PLANES
        store_tile(
            target + b * target_stride_b + (begin + i) * target_stride_i, tile, v, inv_t,
            float("-inf"), tops + at, sums + at, tiles, seed, position, SHARED, WHAT, PROBS, TILE,
        )  # fmt: skip
    if DRAFT == LAW:
        place, at, there = draft_index(b, i, begin, n_draft, RAGGED_DRAFT)
        if (i < gamma) & (i < rows - 1) & there:
            row = draft + place * draft_stride_b + at * draft_stride_i
            to = (draft_slots + slot) * tiles * PLANES
            store_tile(
                row, tile, v, inv_t, float("-inf"), tops + to, sums + to, tiles, seed, position,
                SHARED, MASS, False, TILE,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["gamma", "n_rows", "n_draft", "tiles", "draft_slots", "residual_slots"]
)
def chain_sequences(
    target, target_stride_b, target_stride_i, draft_tokens,
    draft, draft_stride_b, draft_stride_i, draft_logsumexp, draft_threshold,
    draft_temperatures, draft_temperature,
    cu_rows, temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p,
    seeds, positions, uniforms,
    tops, sums,
    tokens, num_accepted, status, logprobs,
    gamma, v, n_rows, n_draft, tiles, draft_slots, residual_slots,
    WHAT: tl.constexpr, PLANES: tl.constexpr, GREEDY: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, PRE: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the verdict on one sequence."""
    b = tl.program_id(0).to(tl.int64)
    temp = parameter(temperatures, temperature, b)
    k = count_parameter(top_ks, top_k, b)
    p = parameter(top_ps, top_p, b)
    least = parameter(min_ps, min_p, b)
    good = valid(temp, k, p, least)
    shaped = ((k > 0) & (k < v)) | (p < 1) | (least > 0)
    if GREEDY:
        temp = tl.full([], 0.0, tl.float64)
    filtered = shaped & (temp > 0)
    # Probabilities that need no shaping are the law itself; the ratio test then reads one entry of
    # each accepted row.
    direct = (temp == 1) & (shaped == 0) & (PROBS and WHAT == MASS)
    inv_t = inverse(temp)
    begin, rows = sequence(cu_rows, b, gamma, n_rows)
    drafts = tl.minimum(rows - 1, gamma)
    seed = tl.load(seeds + b)
    first_position = tl.load(positions + b)
    # Only a SampledDraft has a temperature of its own.
    q_temp = temp
    if DRAFT == SAMPLED:
        q_temp = parameter(draft_temperatures, draft_temperature, b)
        good = good & (q_temp >= 0) & (q_temp < INF)
    q_inv_t = inverse(q_temp)
    residual_at = (residual_slots + b) * tiles * PLANES

    flags = tl.where(good, tl.where(rows > 0, 0, TARGET_NOT_FINITE), BAD_PARAMETER).to(tl.int32)
    going = (flags == 0).to(tl.int32)
    accepted_count = tl.full([], 0, tl.int32)
    i = b * 0
    while going > 0:
        position = first_position + i
        x = tl.load(draft_tokens + b * gamma + i, mask=i < drafts, other=-1).to(tl.int64)
        if (x < -1) | (x >= v):
            flags |= DRAFT_OUT_OF_RANGE
            x = tl.full([], -1, tl.int64)
        row = target + b * target_stride_b + (begin + i) * target_stride_i
        slot = (b * (gamma + 1) + i) if PRE else b
        law_at = slot * tiles * PLANES

        # The target's law. `alive`: nothing read so far forbids a token here.
        p_x = tl.full([], 0.0, tl.float64)
        top = tl.full([], float("-inf"), tl.float32)
        threshold = tl.full([], float("-inf"), tl.float32)
        logsumexp = tl.full([], 0.0, tl.float64)
        alive = tl.full([], 0, tl.int32)
        if direct:
            p_x = tl.load(row + tl.maximum(x, 0), mask=x >= 0, other=0).to(tl.float64)
            alive = ((p_x >= 0) & (p_x < INF)).to(tl.int32)
        else:
            top, threshold, logsumexp = row_law(
                row, v, tiles, tops + law_at, sums + law_at, temp, inv_t, k, p, least, filtered,
                seed, position, SHARED, WHAT, PRE, FILTERS, PROBS, TILE, CHUNK, BLOCK, LOG_TILES,
            )  # fmt: skip
            alive = finite(top).to(tl.int32)

        token = tl.full([], -1, tl.int64)
        logprob = tl.full([], 0.0, tl.float64)
        accepted = tl.full([], 0, tl.int32)
        if (alive > 0) & (temp == 0):
            token = row_argmax(row, v, tops + law_at, tiles, top, PROBS, TILE, BLOCK).to(tl.int64)
            accepted = (token == x).to(tl.int32)
        elif alive > 0:
            if WHAT == RACE:
                token = race(tops + law_at, sums + law_at, tiles, inv_t, TILE, BLOCK).to(tl.int64)
                accepted = (token == x).to(tl.int32)
                logprob = log_probability(row, token, direct, temp, logsumexp, threshold, PROBS)
            elif WHAT == MASS:
                # The draft's probability of x; a point mass unless a draft row says otherwise.
                draft_at = draft
                q_x = tl.full([], 1.0, tl.float64)
                log_q_x = tl.full([], 0.0, tl.float64)
                q_logsumexp = tl.full([], 0.0, tl.float64)
                q_threshold = tl.full([], float("-inf"), tl.float32)
                mode = tl.where(x < 0, KEEP, REMOVE).to(tl.int32)
                if DRAFT != POINT:
                    place, at, there = draft_index(b, i, begin, n_draft, RAGGED_DRAFT)
                    sound = there
                    if (x >= 0) & (q_temp != 0) & there:
                        draft_at = draft + place * draft_stride_b + at * draft_stride_i
                        d = tl.load(draft_at + x).to(tl.float64)
                        if DRAFT == LAW:
                            to = (draft_slots + slot) * tiles * PLANES
                            q_top, _, q_logsumexp = row_law(
                                draft_at, v, tiles, tops + to, sums + to, temp, inv_t, k, p, least,
                                False, seed, position, SHARED, MASS, PRE, False, False, TILE,
                                CHUNK, BLOCK, LOG_TILES,
                            )  # fmt: skip
                            sound = finite(q_top)
                            log_q_x = d / temp - q_logsumexp
                        elif DRAFT == RAW:
                            sound = (d >= 0) & (d < INF)
                            q_x = d
                            log_q_x = log64(d)
                        else:
                            q_logsumexp = tl.load(draft_logsumexp + b * gamma + i)
                            q_threshold = tl.load(draft_threshold + b * gamma + i)
                            sound = (tl.abs(q_logsumexp) < INF) & (d < INF)
                            sound = sound & (q_threshold >= -INF)  # not NaN
                            log_q_x = tl.where(
                                d >= q_threshold.to(tl.float64), d / q_temp - q_logsumexp, -INF
                            )
                    if (x >= 0) & (q_temp != 0):
                        mode = tl.where(sound, SUBTRACT, KEEP).to(tl.int32)
                        flags |= tl.where(sound, 0, DRAFT_NOT_FINITE).to(tl.int32)
                if mode != KEEP:
                    if uniforms is None:
                        u = uniform(seed, position, ACCEPT)
                    else:
                        u = tl.load(uniforms + b * (gamma + 1) + i)
                    logprob = log_probability(row, x, direct, temp, logsumexp, threshold, PROBS)
                    hit = log64(u) < logprob - log_q_x
                    if PROBS and DRAFT != SAMPLED:
                        # Both are given numbers: compare them as they are.
                        hit = tl.where(direct, u * q_x < p_x, hit)
                    accepted = hit.to(tl.int32)
                    token = x
                if accepted == 0:
                    token = tl.full([], -1, tl.int64)
                    if uniforms is None:
                        u = uniform(seed, position, RESIDUAL)
                    else:
                        u = tl.load(uniforms + b * (gamma + 1) + gamma)
                    c, r = density_constants(logsumexp, temp)
                    q_c, q_r = density_constants(q_logsumexp, q_temp)
                    linear = (direct | (mode != KEEP)).to(tl.int32)
                    work = linear
                    scale = tl.full([], 0.0, tl.float32)
                    while work > 0:
                        work = tl.full([], 0, tl.int32)
                        p_top, q_top = fill_residual(
                            row, v, tiles, direct, threshold, c, r, inv_t, draft_at, x, mode,
                            q_threshold, q_c, q_r, q_inv_t, tops + residual_at,
                            sums + residual_at, PROBS, DRAFT, TILE,
                        )  # fmt: skip
                        if direct & ((p_top == 0) | (p_top == INF)):
                            alive = tl.full([], 0, tl.int32)
                        else:
                            scale = row_top(tops + residual_at, tiles, BLOCK)
                            total = row_total(
                                tops + residual_at, sums + residual_at, tiles, scale, inv_t, True,
                                LOG_TILES, BLOCK,
                            )  # fmt: skip
                            unsound = (mode == SUBTRACT) & ((q_top == INF) | (q_top == -INF))
                            if (mode != KEEP) & (unsound | (total == 0)):
                                # Nothing to subtract: sample from the target.
                                flags |= tl.where(unsound, DRAFT_NOT_FINITE, EMPTY_RESIDUAL).to(
                                    tl.int32
                                )
                                mode = tl.full([], KEEP, tl.int32)
                                linear = direct.to(tl.int32)
                                work = linear
                    if (alive > 0) & (linear > 0):
                        token = draw_residual(
                            row, v, tiles, direct, threshold, c, r, inv_t, draft_at, x, mode,
                            q_threshold, q_c, q_r, q_inv_t, tops + residual_at,
                            sums + residual_at, scale, u, PROBS, DRAFT, TILE, BLOCK, LOG_TILES,
                        ).to(tl.int64)  # fmt: skip
                    elif alive > 0:
                        token = draw(
                            row, v, tiles, tops + law_at, sums + law_at, top, threshold, inv_t, u,
                            PROBS, TILE, BLOCK, LOG_TILES,
                        ).to(tl.int64)  # fmt: skip
                    logprob = tl.full([], 0.0, tl.float64)
                    if alive > 0:
                        logprob = log_probability(
                            row, token, direct, temp, logsumexp, threshold, PROBS
                        )
        flags |= tl.where(alive > 0, 0, TARGET_NOT_FINITE).to(tl.int32)
        accepted = tl.where(alive > 0, accepted, 0)
        at = b * (gamma + 1) + i
        tl.store(tokens + at, token.to(tokens.dtype.element_ty))
        tl.store(logprobs + at, logprob.to(tl.float32))
        accepted_count += accepted
        going = accepted
        i += 1

    tl.store(num_accepted + b, accepted_count)
    tl.store(status + b, flags)
    for j in range(i.to(tl.int32), gamma + 1):
        tl.store(tokens + b * (gamma + 1) + j, -1)
        tl.store(logprobs + b * (gamma + 1) + j, 0.0)


def verify_chain(*args: Any) -> tuple[Tensor, ...]:
    """`reference.verify_chain` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    a = ChainArguments(*args)
    a.check()
    (
        target, draft_tokens, draft, _, _, draft_logsumexp, draft_threshold, draft_temperatures,
        draft_temperature, kind, rule, temperatures, temperature, top_ks, top_k, top_ps, top_p,
        min_ps, min_p, seeds, positions, cu_rows, uniforms, *_,
    ) = a  # fmt: skip
    batch, gamma = draft_tokens.shape
    v = target.shape[-1]
    tokens = draft_tokens.new_empty((batch, gamma + 1))
    num_accepted = draft_tokens.new_empty((batch,), dtype=torch.int32)
    status = draft_tokens.new_empty((batch,), dtype=torch.int32)
    logprobs = target.new_empty((batch, gamma + 1), dtype=torch.float32)
    out = tokens, num_accepted, status, logprobs
    if batch == 0:
        return out

    what = {"token": MASS, "match": RACE, "greedy": TOPS}[rule].value
    probs = kind == "probs"
    draft_is = POINT.value
    if rule == "token" and draft is not None:
        draft_is = RAW.value if probs else LAW.value
        if draft_logsumexp is not None:
            draft_is = SAMPLED.value
    if draft is None or draft_is == POINT.value:
        draft = target  # never read
    filters = launch.filters(v, top_ks, top_k, top_ps, top_p, min_ps, min_p)
    filtering = rule != "greedy" and launch.filtering(v, *filters)
    # One entry of an accepted row is all that such a call reads of it.
    direct = probs and rule == "token" and not filtering and temperatures is None
    shape = launch.tiling(v)
    split = launch.row_parallel(target, batch, shape.tiles) and not (direct and temperature == 1)

    # Slots: target rows, draft rows where they need statistics, one residual a sequence.
    draft_slots = batch * (gamma + 1) if split else batch
    residual_slots = draft_slots * (2 if draft_is == LAW.value else 1)
    planes = 2 if rule == "match" else 1
    size = (residual_slots + batch) * shape.tiles * planes
    tops = target.new_empty((size,), dtype=torch.float32)
    sums = target.new_empty((size,), dtype=torch.int64)

    ragged_draft = draft.dim() == 2
    target_strides = (0 if cu_rows is not None else target.stride(0), target.stride(-2))
    draft_strides = (0 if ragged_draft else draft.stride(0), draft.stride(-2))
    n_rows = target.shape[0] if cu_rows is not None else batch * (gamma + 1)
    n_draft = draft.shape[0] if ragged_draft else batch * gamma
    temps, q_temps, seeds, positions, draft_tokens, cu_rows, uniforms, q_sums, q_thresholds = (
        launch.packed(
            temperatures, draft_temperatures, seeds, positions, draft_tokens, cu_rows, uniforms,
            draft_logsumexp, draft_threshold,
        )
    )  # fmt: skip
    temperature = _checks.float32(temperature)
    options = {
        "WHAT": what, "PLANES": planes, "PROBS": probs, "DRAFT": draft_is,
        "RAGGED_DRAFT": ragged_draft, "TILE": launch.TILE, **launch.OPTIONS,
    }  # fmt: skip
    with launch.on_device_of(target):
        if split:
            chain_tiles[(shape.tiles, gamma + 1, batch)](
                target, *target_strides, draft, *draft_strides, cu_rows, temps, temperature,
                seeds, positions, tops, sums, gamma, v, n_rows, n_draft, shape.tiles, draft_slots,
                **options,
            )  # fmt: skip
        chain_sequences[(batch,)](
            target, *target_strides, draft_tokens, draft, *draft_strides, q_sums, q_thresholds,
            q_temps, _checks.float32(draft_temperature), cu_rows, temps, temperature, *filters,
            seeds, positions, uniforms, tops, sums, *out, gamma, v, n_rows, n_draft, shape.tiles,
            draft_slots, residual_slots,
            GREEDY=rule == "greedy", FILTERS=filtering, PRE=split, CHUNK=launch.CHUNK,
            BLOCK=shape.block, LOG_TILES=shape.log_tiles, **options,
        )  # fmt: skip
    return out
