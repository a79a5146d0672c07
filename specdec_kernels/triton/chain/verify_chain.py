"""`specdec_kernels::verify_chain` in Triton.

One program verifies one sequence, by rule block (block.py) or by any other rule (decide.py). For
small batches a grid over (tile, row, sequence) first fills the tile statistics of all rows
(`chain_tiles`), so that the whole device works on few sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...arguments.chain import ChainArguments
from ...arguments.checks import float32
from .. import launch
from ..row.distribution import MASSES, Sampling, store_tile
from ..row.draft import DRAFT_LOGITS, ONE_HOT, Drafts, draft_index
from ..row.noise import SHARED
from ..row.status import DRAFT_OUT_OF_RANGE
from ..row.tile import TileStats, flag, inverse, parameter
from .block import SAVED, decide_block
from .decide import ChainOutputs, ChainScratch, decide
from .rules import BLOCK_RULE, GREEDY, RuleParams, first_and_second
from .sequence import (
    ROW_ARGUMENTS,
    Noise,
    TargetRows,
    plan,
    sequence_rows,
    verification_params,
)

STEP = tl.constexpr(32)  # drafts that one step of `find_drafts` looks at
NEVER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def find_drafts(draft_token_ids, rows, id_limit, eos_token_ids, num_eos, max_new_tokens, b):
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
        x = tl.load(draft_token_ids + index, mask=index < drafts, other=-1).to(tl.int64)
        bad = (x < -1) | (x >= id_limit)
        stop = tl.minimum(stop, tl.min(tl.where((x < 0) | bad, index, NEVER), 0))
        wrong = tl.minimum(wrong, tl.min(tl.where(bad, index, NEVER), 0))
        if eos_token_ids is not None:
            for e in range(0, num_eos):
                ends = x == tl.load(eos_token_ids + e)
                last = tl.minimum(last, tl.min(tl.where(ends, index, NEVER), 0))
    stop = tl.minimum(stop, drafts)
    no_bonus = last < stop
    count = tl.where(no_bonus, last + 1, stop).to(tl.int64)
    out_of_range = (wrong == stop) & (no_bonus == 0)
    if max_new_tokens is not None:
        most = tl.maximum(tl.load(max_new_tokens + b).to(tl.int64), 0)
        out_of_range = out_of_range & (stop < most)
        no_bonus = no_bonus | (most <= count)
        count = tl.minimum(count, most)
    return count, no_bonus.to(tl.int32), tl.where(out_of_range, DRAFT_OUT_OF_RANGE, 0).to(tl.int32)


@launch.kernel(*ROW_ARGUMENTS)
def chain_tiles(
    target, target_stride_b, target_stride_i, draft, draft_stride_b, draft_stride_i,
    target_indptr, temperatures, temperature, seeds, positions,
    tile_maxima, tile_sums,
    gamma, v, d, n_rows, n_draft, tiles, d_tiles, stats_size, draft_stats,
    STATS: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (most tiles of a row, gamma + 1, B): a tile of a target row and of its draft row."""
    tile = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    begin, rows = sequence_rows(target_indptr, b, gamma, n_rows)
    inv_t = inverse(parameter(temperatures, temperature, b))
    seed = tl.load(seeds + b).to(tl.int64)
    position = tl.load(positions + b).to(tl.int64) + i
    index = b * (gamma + 1) + i
    if (i < rows) & (tile < tiles):
        offset = index * stats_size
        store_tile(
            target + b * target_stride_b + (begin + i) * target_stride_i, tile, v, inv_t,
            float("-inf"), TileStats(tile_maxima + offset, tile_sums + offset, tiles), seed,
            position, SHARED, STATS, PROBS, TILE,
        )  # fmt: skip
    if DRAFT == DRAFT_LOGITS:
        place, draft_i, there = draft_index(b, i, begin, n_draft, RAGGED_DRAFT)
        if (i < rows - 1) & there & (tile < d_tiles):
            row = draft + place * draft_stride_b + draft_i * draft_stride_i
            offset = (draft_stats + index) * stats_size
            store_tile(
                row, tile, d, inv_t, float("-inf"),
                TileStats(tile_maxima + offset, tile_sums + offset, d_tiles), seed, position,
                SHARED, MASSES, False, TILE,
            )  # fmt: skip


@launch.kernel(*ROW_ARGUMENTS, "draft_ids", "draft_columns")
def chain_sequences(
    target, target_stride_b, target_stride_i, draft_token_ids,
    draft, draft_stride_b, draft_stride_i, draft_ids, draft_columns, draft_logsumexp,
    draft_threshold, draft_temperatures, draft_temperature,
    target_indptr, temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p,
    seeds, positions, uniforms,
    lenience, first, second, synthetic_rates, eos_token_ids, max_new_tokens,
    tile_maxima, tile_sums, workspace,
    tokens, num_accepted, status, logprobs, accept_probs,
    gamma, v, d, n_rows, n_draft, tiles, d_tiles, stats_size, draft_stats, residual_stats,
    id_limit, num_eos,
    RULE: tl.constexpr, READS_DRAFT: tl.constexpr, STATS: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr,
    DRAFT: tl.constexpr, RAGGED_DRAFT: tl.constexpr, BEYOND: tl.constexpr,
    ROW_PARALLEL: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (B,): each program verifies one sequence."""
    b = tl.program_id(0).to(tl.int64)
    begin, rows = sequence_rows(target_indptr, b, gamma, n_rows)
    sampling = Sampling(temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p)
    params, draft_temperature, flags = verification_params(
        sampling, draft_temperatures, draft_temperature, b, v, rows, uniforms, gamma + 1,
        RULE == GREEDY, READS_DRAFT, PROBS, DRAFT,
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
    accepted = tl.full([], 0, tl.int32)
    written = tl.full([], 0, tl.int32)
    probs_written = tl.full([], 0, tl.int32)
    if flags == 0:
        count, no_bonus, status_after_drafts = find_drafts(
            draft_token_ids, rows, id_limit, eos_token_ids, num_eos, max_new_tokens, b
        )
        target_rows = TargetRows(
            target + b * target_stride_b + begin * target_stride_i, target_stride_i
        )
        drafts = Drafts(
            draft, draft_stride_b, draft_stride_i, draft_ids, draft_columns, d, draft_logsumexp,
            draft_threshold, draft_temperature, b, begin, gamma, n_draft,
        )  # fmt: skip
        seed, position = tl.load(seeds + b).to(tl.int64), tl.load(positions + b).to(tl.int64)
        noise = Noise(seed, position, uniforms)
        scratch = ChainScratch(
            tile_maxima, tile_sums, stats_size, tiles, d_tiles,
            (b * (gamma + 1)) if ROW_PARALLEL else b, draft_stats, residual_stats + b,
        )  # fmt: skip
        out = ChainOutputs(tokens, logprobs, accept_probs)
        zero = tl.full([], 0.0, tl.float64)
        rule_params = RuleParams(zero + lenience, zero + first, zero + second, synthetic_rates)
        one_by_one = tl.full([], 1, tl.int32)
        if RULE == BLOCK_RULE:  # noqa: SIM102  (compiled in for this rule only)
            if params.temperature != 0:
                one_by_one = tl.full([], 0, tl.int32)
                probs_written = tl.full([], 0, tl.int32) + gamma
                accepted, written, more = decide_block(
                    target_rows, draft_token_ids, count, no_bonus, status_after_drafts, drafts,
                    params, noise, scratch, workspace + b * (gamma + 1) * SAVED, out, gamma, v,
                    RULE, ROW_PARALLEL, FILTERS, PROBS, DRAFT, RAGGED_DRAFT, BEYOND, TILE, CHUNK,
                    BLOCK, LOG_TILES, WIDTH,
                )  # fmt: skip
                flags |= more
        if one_by_one > 0:
            accepted, written, more = decide(
                target_rows, draft_token_ids, count, no_bonus, status_after_drafts, drafts, params,
                noise, scratch, rule_params, out, gamma, v,
                RULE, STATS, ROW_PARALLEL, FILTERS, PROBS, DRAFT, RAGGED_DRAFT, BEYOND, TILE, CHUNK,
                BLOCK, LOG_TILES, WIDTH,
            )  # fmt: skip
            probs_written = written
            flags |= more

    tl.store(num_accepted + b, accepted)
    tl.store(status + b, flags)
    tl.debug_barrier()
    for j in range(written, gamma + 1):
        tl.store(tokens + j, -1)
        if logprobs is not None:
            tl.store(logprobs + j, 0.0)
    if accept_probs is not None:
        for j in range(probs_written, gamma):
            tl.store(accept_probs + j, float("nan"))


def verify_chain(*args: Any) -> tuple[Tensor, ...]:
    """`reference.verify_chain` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    a = ChainArguments(*args)
    out = a.new_outputs()
    batch, gamma = a.draft_token_ids.shape
    if batch == 0:
        return out
    p = plan(a)
    target, v, logits = a.target, a.target.shape[-1], p.form == DRAFT_LOGITS.value
    # Such a call reads one entry of each accepted row, so a grid over tiles would read too much.
    direct = p.options["PROBS"] and a.reads_draft and not p.options["FILTERS"]
    direct = direct and a.temperatures is None and a.temperature == 1
    row_parallel = launch.row_parallel(target, batch, p.shape.tiles) and not direct

    # Tile statistics of the target rows, of the draft rows if they need them, and of one residual
    # a sequence, in this order.
    draft_stats = batch * (gamma + 1) if row_parallel else batch
    residual_stats = draft_stats * (2 if logits else 1)
    maxima, sums = launch.scratch(target, (residual_stats + batch) * p.stats_size)
    workspace = None
    if a.rule_name == "block":
        workspace = target.new_empty((batch * (gamma + 1) * SAVED.value,), dtype=torch.float64)

    ragged_draft = p.form != ONE_HOT.value and a.ragged_draft
    n_draft = p.draft.rows.shape[0] if ragged_draft else batch * gamma
    temps, seeds, positions, target_indptr = launch.packed(
        a.temperatures, a.seeds, a.positions, a.target_indptr
    )
    temperature = float32(a.temperature)
    counts = (
        gamma, v, p.draft.rows.shape[-1], p.n_rows, n_draft, p.shape.tiles, p.d_tiles, p.stats_size,
        draft_stats,
    )  # fmt: skip
    with launch.on_device_of(target):
        if row_parallel:
            chain_tiles[(p.most.tiles, gamma + 1, batch)](
                *p.target, *p.draft, target_indptr, temps, temperature, seeds, positions,
                maxima, sums, *counts, STATS=p.options["STATS"], PROBS=p.options["PROBS"],
                DRAFT=p.form, RAGGED_DRAFT=ragged_draft, TILE=launch.TILE, **launch.OPTIONS,
            )  # fmt: skip
        chain_sequences[(batch,)](
            *p.target, *launch.packed(a.draft_token_ids), *p.draft, *p.draft_arguments,
            target_indptr, temps, temperature, *p.filters, seeds, positions,
            *launch.packed(a.uniforms), float32(a.lenience), *first_and_second(a),
            *launch.packed(a.synthetic_rates, a.eos_token_ids, a.max_new_tokens),
            maxima, sums, workspace, out.tokens, out.num_accepted, out.status,
            out.logprobs if a.with_logprobs else None,
            out.accept_probs if a.with_accept_probs else None, *counts, residual_stats, a.id_limit,
            p.num_eos, RULE=a.rule, RAGGED_DRAFT=ragged_draft,
            ROW_PARALLEL=row_parallel, **p.options,
        )  # fmt: skip
    return out
