"""`specdec_kernels::verify_chain` in Triton.

One program a sequence: rule block (block.py), every other rule (walk.py). For small batches a grid
over (tile, row, sequence) first fills the slots of all rows (`chain_tiles`), and the same programs
read them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.checks import float32
from specdec_kernels.arguments.rules import RULES
from specdec_kernels.triton import launch
from specdec_kernels.triton.chain.block import MARKS, block
from specdec_kernels.triton.chain.decide import walk
from specdec_kernels.triton.chain.rules import (
    BLOCK_RULE,
    DRAFT_OUT_OF_RANGE,
    GREEDY,
    LENIENT,
    TOKEN,
)
from specdec_kernels.triton.chain.sequence import plan, sequence, shaping_of
from specdec_kernels.triton.row.distribution import MASS, store_tile
from specdec_kernels.triton.row.draft import LAW, POINT, draft_index
from specdec_kernels.triton.row.philox import SHARED
from specdec_kernels.triton.row.tile import flag, inverse, parameter

SPAN = tl.constexpr(32)  # drafts that one step of `limit` looks at
NEVER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def limit(draft_token_ids, rows, id_limit, eos_token_ids, num_eos, max_new_tokens, b):
    """(how many drafts are judged, whether nothing follows when all stand, status of what follows).

    Nothing follows an end-of-sequence token or the last token that may be emitted.
    """
    stop = flag(NEVER)
    wrong = flag(NEVER)
    last = flag(NEVER)
    drafts = tl.maximum(rows - 1, 0).to(tl.int32)
    for start in range(0, drafts, SPAN):
        index = start + tl.arange(0, SPAN)
        x = tl.load(draft_token_ids + index, mask=index < drafts, other=-1).to(tl.int64)
        bad = (x < -1) | (x >= id_limit)
        stop = tl.minimum(stop, tl.min(tl.where((x < 0) | bad, index, NEVER), 0))
        wrong = tl.minimum(wrong, tl.min(tl.where(bad, index, NEVER), 0))
        if eos_token_ids is not None:
            for e in range(0, num_eos):
                ends = x == tl.load(eos_token_ids + e)
                last = tl.minimum(last, tl.min(tl.where(ends, index, NEVER), 0))
    stop = tl.minimum(stop, drafts)
    cut = last < stop
    count = tl.where(cut, last + 1, stop).to(tl.int64)
    out = (wrong == stop) & (cut == 0)
    if max_new_tokens is not None:
        most = tl.maximum(tl.load(max_new_tokens + b), 0)
        out = out & (stop < most)
        cut = cut | (most <= count)
        count = tl.minimum(count, most)
    return count, cut.to(tl.int32), tl.where(out, DRAFT_OUT_OF_RANGE, 0).to(tl.int32)


@triton.jit(do_not_specialize=["gamma", "n_rows", "n_draft", "tiles", "d_tiles", "slot_size",
                               "draft_slots"])  # fmt: skip
def chain_tiles(
    target, target_stride_b, target_stride_i, draft, draft_stride_b, draft_stride_i,
    target_indptr, temperatures, temperature, seeds, positions,
    tops, sums,
    gamma, v, d, n_rows, n_draft, tiles, d_tiles, slot_size, draft_slots,
    WHAT: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (most tiles of a row, gamma + 1, B): a tile of a target row, and of its draft row."""
    tile = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    begin, rows = sequence(target_indptr, b, gamma, n_rows)
    inv_t = inverse(parameter(temperatures, temperature, b))
    seed = tl.load(seeds + b)
    position = tl.load(positions + b) + i
    slot = b * (gamma + 1) + i
    if (i < rows) & (tile < tiles):
        at = slot * slot_size
        store_tile(
            target + b * target_stride_b + (begin + i) * target_stride_i, tile, v, inv_t,
            float("-inf"), tops + at, sums + at, tiles, seed, position, SHARED, WHAT, PROBS, TILE,
        )  # fmt: skip
    if DRAFT == LAW:
        place, at, there = draft_index(b, i, begin, n_draft, RAGGED_DRAFT)
        if (i < rows - 1) & there & (tile < d_tiles):
            row = draft + place * draft_stride_b + at * draft_stride_i
            to = (draft_slots + slot) * slot_size
            store_tile(
                row, tile, d, inv_t, float("-inf"), tops + to, sums + to, d_tiles, seed, position,
                SHARED, MASS, False, TILE,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "gamma", "n_rows", "n_draft", "tiles", "d_tiles", "slot_size", "draft_slots",
        "residual_slots", "id_limit", "num_eos",
    ]
)  # fmt: skip
def chain_sequences(
    target, target_stride_b, target_stride_i, draft_token_ids,
    draft, draft_stride_b, draft_stride_i, draft_ids, draft_columns, draft_logsumexp,
    draft_threshold, draft_temperatures, draft_temperature,
    target_indptr, temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p,
    seeds, positions, uniforms,
    lenience, typical_epsilon, typical_delta, synthetic_rates, eos_token_ids, max_new_tokens,
    tops, sums, marks,
    tokens, num_accepted, status, logprobs, accept_probs,
    gamma, v, d, n_rows, n_draft, tiles, d_tiles, slot_size, draft_slots, residual_slots,
    id_limit, num_eos,
    RULE: tl.constexpr, WHAT: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, BEYOND: tl.constexpr, PRE: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the verdict on one sequence."""
    b = tl.program_id(0).to(tl.int64)
    begin, rows = sequence(target_indptr, b, gamma, n_rows)
    ratio_rule: tl.constexpr = (
        RULE == TOKEN or RULE == BLOCK_RULE or RULE == LENIENT  # noqa: PLR1714
    )
    shaping, q_temp, flags = shaping_of(
        (temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p),
        draft_temperatures, draft_temperature, b, v, rows, RULE == GREEDY, ratio_rule, PROBS, DRAFT,
    )  # fmt: skip
    draft_token_ids += b * gamma
    tokens += b * (gamma + 1)
    if logprobs is not None:
        logprobs += b * (gamma + 1)
    if accept_probs is not None:
        accept_probs += b * gamma
    if uniforms is not None:
        uniforms += b * (gamma + 1)
    if draft_logsumexp is not None:
        draft_logsumexp += b * gamma
        draft_threshold += b * gamma

    count = b * 0
    stood = tl.full([], 0, tl.int32)
    written = tl.full([], 0, tl.int32)
    looked = tl.full([], 0, tl.int32)
    if flags == 0:
        count, cut, missing = limit(
            draft_token_ids, rows, id_limit, eos_token_ids, num_eos, max_new_tokens, b
        )
        target_rows = (
            target + b * target_stride_b + begin * target_stride_i, target_stride_i,
        )  # fmt: skip
        drafts = (
            draft, draft_stride_b, draft_stride_i, (draft_ids, draft_columns), d,
            draft_logsumexp, draft_threshold, q_temp, b, begin, gamma, n_draft,
        )  # fmt: skip
        noise = (tl.load(seeds + b), tl.load(positions + b), uniforms)
        scratch = (
            tops, sums, (b * (gamma + 1)) if PRE else b, draft_slots, slot_size,
            (residual_slots + b) * slot_size,
        )  # fmt: skip
        out = (tokens, logprobs, accept_probs)
        zero = tl.full([], 0.0, tl.float64)
        judge = (zero + lenience, zero + typical_epsilon, zero + typical_delta, synthetic_rates)
        walking = tl.full([], 1, tl.int32)
        if RULE == BLOCK_RULE:  # noqa: SIM102  (compiled in for this rule only)
            if shaping[0] != 0:
                walking = tl.full([], 0, tl.int32)
                looked = tl.full([], 0, tl.int32) + gamma
                stood, written, more = block(
                    target_rows, draft_token_ids, count, cut, missing, drafts, shaping, noise, scratch,
                    marks + b * (gamma + 1) * MARKS, out, gamma, v, tiles, d_tiles,
                    RULE, PRE, FILTERS, PROBS, DRAFT, RAGGED_DRAFT, BEYOND, TILE, CHUNK, BLOCK,
                    LOG_TILES, WIDTH,
                )  # fmt: skip
                flags |= more
        if walking > 0:
            stood, written, more = walk(
                target_rows, draft_token_ids, count, cut, missing, drafts, shaping, noise, scratch,
                judge, out, gamma, v, tiles, d_tiles,
                RULE, WHAT, PRE, FILTERS, PROBS, DRAFT, RAGGED_DRAFT, BEYOND, TILE, CHUNK, BLOCK,
                LOG_TILES, WIDTH,
            )  # fmt: skip
            looked = written
            flags |= more

    tl.store(num_accepted + b, stood)
    tl.store(status + b, flags)
    tl.debug_barrier()
    for j in range(written, gamma + 1):
        tl.store(tokens + j, -1)
        if logprobs is not None:
            tl.store(logprobs + j, 0.0)
    if accept_probs is not None:
        for j in range(looked, gamma):
            tl.store(accept_probs + j, float("nan"))


def verify_chain(*args: Any) -> tuple[Tensor, ...]:
    """`reference.verify_chain` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    a = ChainArguments(*args)
    a.check()
    out = a.new_outputs()
    batch, gamma = a.draft_token_ids.shape
    if batch == 0:
        return out
    p = plan(a)
    target, v, law = a.target, a.target.shape[-1], p.form == LAW.value
    # One entry of an accepted row is all that such a call reads of it.
    direct = p.options["PROBS"] and a.reads_draft and not p.options["FILTERS"]
    direct = direct and a.temperatures is None and a.temperature == 1
    split = launch.row_parallel(target, batch, p.shape.tiles) and not direct

    # Slots: target rows, draft rows where they need statistics, one residual a sequence.
    draft_slots = batch * (gamma + 1) if split else batch
    residual_slots = draft_slots * (2 if law else 1)
    tops, sums = launch.scratch(target, (residual_slots + batch) * p.slot_size)
    marks = None
    if a.rule == "block":
        marks = target.new_empty((batch * (gamma + 1) * MARKS.value,), dtype=torch.float64)

    ragged_draft = p.form != POINT.value and a.ragged_draft
    n_draft = p.draft[0].shape[0] if ragged_draft else batch * gamma
    temps, seeds, positions, target_indptr = launch.packed(
        a.temperatures, a.seeds, a.positions, a.target_indptr
    )
    temperature = float32(a.temperature)
    counts = (
        gamma, v, p.draft[0].shape[-1], p.n_rows, n_draft, p.shape.tiles, p.d_tiles, p.slot_size,
        draft_slots,
    )  # fmt: skip
    with launch.on_device_of(target):
        if split:
            chain_tiles[(p.most.tiles, gamma + 1, batch)](
                *p.target, *p.draft, target_indptr, temps, temperature, seeds, positions, tops, sums,
                *counts, WHAT=p.options["WHAT"], PROBS=p.options["PROBS"], DRAFT=p.form,
                RAGGED_DRAFT=ragged_draft, TILE=launch.TILE, **launch.OPTIONS,
            )  # fmt: skip
        chain_sequences[(batch,)](
            *p.target, *launch.packed(a.draft_token_ids), *p.draft, *p.laws, target_indptr, temps,
            temperature, *p.filters, seeds, positions, *launch.packed(a.uniforms),
            float32(a.lenience), float32(a.typical_epsilon), float32(a.typical_delta),
            *launch.packed(a.synthetic_rates, a.eos_token_ids, a.max_new_tokens),
            tops, sums, marks, *out[:3], out[3] if a.with_logprobs else None,
            out[4] if a.with_accept_probs else None, *counts, residual_slots, a.id_limit, p.num_eos,
            RULE=RULES.index(a.rule), RAGGED_DRAFT=ragged_draft, PRE=split, **p.options,
        )  # fmt: skip
    return out
