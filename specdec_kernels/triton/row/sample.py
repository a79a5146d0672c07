"""`specdec_kernels::sample` in Triton."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from ...arguments.checks import float32
from ...arguments.sample import STREAMS, SampleArguments
from .. import launch
from .distribution import (
    GUMBEL,
    MASSES,
    Sampling,
    draw_token,
    gumbel_argmax,
    row_stats,
    sequence_params,
    store_tile,
)
from .noise import uniform
from .status import BAD_PARAMETER, TARGET_INVALID
from .tile import (
    TileStats,
    finite,
    flag,
    inverse,
    parameter,
    row_argmax,
)


@launch.kernel("logits", "row_stride", "v")
def sample_tiles(
    logits, row_stride, v, tiles,
    temperatures, temperature, seeds, positions,
    tile_maxima, tile_sums,
    STREAM: tl.constexpr, STATS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (R, tiles): each program computes the statistics of one tile, unfiltered."""
    r = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    inv_t = inverse(parameter(temperatures, temperature, r))
    offset = r * tiles * STATS
    store_tile(
        logits + r * row_stride, tile, v, inv_t, float("-inf"),
        TileStats(tile_maxima + offset, tile_sums + offset, tiles),
        tl.load(seeds + r).to(tl.int64), tl.load(positions + r).to(tl.int64), STREAM, STATS, False,
        TILE,
    )  # fmt: skip


@launch.kernel("logits", "row_stride", "v")
def sample_rows(
    logits, row_stride, v, tiles,
    temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p,
    seeds, positions,
    tile_maxima, tile_sums,
    tokens, logprobs, logsumexps, thresholds, status,
    STREAM: tl.constexpr, STATS: tl.constexpr, ROW_PARALLEL: tl.constexpr, FILTERS: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Grid (R,): each program samples one row."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * row_stride
    sampling = Sampling(temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p)
    params, good = sequence_params(sampling, r, v, False, False)
    token = tl.full([], -1, tl.int32)
    logprob = tl.full([], 0.0, tl.float64)
    logsumexp = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], 0.0, tl.float32)
    fault = flag(BAD_PARAMETER)
    if good:
        seed = tl.load(seeds + r).to(tl.int64)
        position = tl.load(positions + r).to(tl.int64)
        offset = r * tiles * STATS
        tile_stats = TileStats(tile_maxima + offset, tile_sums + offset, tiles)
        stats = row_stats(
            row, v, tile_stats, params, seed, position, STREAM, STATS, ROW_PARALLEL, FILTERS,
            False, TILE, CHUNK, BLOCK, LOG_TILES,
        )  # fmt: skip
        threshold = stats.threshold
        logsumexp = stats.logsumexp
        fault = tl.where(finite(stats.maximum), 0, TARGET_INVALID).to(tl.int32)
        if fault > 0:
            threshold = tl.full([], 0.0, tl.float32)
        elif params.temperature == 0:
            token = row_argmax(row, v, tile_stats, stats.maximum, False, TILE, BLOCK)
            logsumexp = tl.full([], 0.0, tl.float64)
            threshold = stats.maximum
        else:
            if STATS == GUMBEL:
                token = gumbel_argmax(tile_stats, params.inv_t, TILE, BLOCK)
            else:
                u = uniform(seed, position, STREAM)
                token = draw_token(
                    row, v, tile_stats, stats.maximum, threshold, params.inv_t, u, False, TILE,
                    BLOCK, LOG_TILES,
                )  # fmt: skip
            logprob = tl.load(row + token).to(tl.float64) / params.temperature - logsumexp
    tl.store(tokens + r, token.to(tl.int64))
    tl.store(logprobs + r, logprob.to(tl.float32))
    tl.store(logsumexps + r, logsumexp)
    tl.store(thresholds + r, threshold)
    tl.store(status + r, fault)


def sample(*args: Any) -> tuple[Tensor, ...]:
    """`reference.sample` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    a = SampleArguments(*args)
    logits, out = a.logits, a.new_outputs()
    n, v = logits.shape
    if n == 0:
        return out
    shape = launch.tiling(v)
    stats = GUMBEL.value if a.method_name == "gumbel" else MASSES.value
    row_parallel = launch.row_parallel(logits, n, shape.tiles)
    stream = STREAMS[a.noise_name]
    maxima, sums = launch.scratch(logits, n * stats * shape.tiles)
    temps, seeds, positions = launch.packed(a.temperatures, a.seeds, a.positions)
    temperature = float32(a.temperature)
    filters = launch.filters(v, a)
    with launch.on_device_of(logits):
        if row_parallel:
            sample_tiles[(n, shape.tiles)](
                logits, logits.stride(0), v, shape.tiles, temps, temperature, seeds, positions,
                maxima, sums, STREAM=stream, STATS=stats, TILE=launch.TILE, **launch.OPTIONS,
            )  # fmt: skip
        sample_rows[(n,)](
            logits, logits.stride(0), v, shape.tiles, temps, temperature,
            *filters, seeds, positions, maxima, sums, *out,
            STREAM=stream, STATS=stats, ROW_PARALLEL=row_parallel, FILTERS=launch.filtering(v,
            filters), TILE=launch.TILE, CHUNK=launch.CHUNK, BLOCK=shape.block,
            LOG_TILES=shape.log_tiles, **launch.OPTIONS,
        )  # fmt: skip
    return out
