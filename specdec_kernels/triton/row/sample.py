"""`specdec_kernels::sample` in Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.arguments.checks import float32
from specdec_kernels.arguments.sample import STREAMS, SampleArguments
from specdec_kernels.triton import launch
from specdec_kernels.triton.row.distribution import MASS, RACE, draw, race, row_law, store_tile
from specdec_kernels.triton.row.philox import uniform
from specdec_kernels.triton.row.tile import (
    count_parameter,
    finite,
    inverse,
    parameter,
    row_argmax,
    valid,
)


@triton.jit(do_not_specialize=["tiles"])
def sample_tiles(
    logits, row_stride, v, tiles,
    temperatures, temperature, seeds, positions,
    tops, sums,
    STREAM: tl.constexpr, WHAT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (R, tiles): the statistics of one tile, unfiltered."""
    r = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    inv_t = inverse(parameter(temperatures, temperature, r))
    slot = r * tiles * WHAT
    store_tile(
        logits + r * row_stride, tile, v, inv_t, float("-inf"), tops + slot, sums + slot, tiles,
        tl.load(seeds + r), tl.load(positions + r), STREAM, WHAT, False, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles"])
def sample_rows(
    logits, row_stride, v, tiles,
    temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p,
    seeds, positions,
    tops, sums,
    tokens, logprobs, logsumexps, thresholds, status,
    STREAM: tl.constexpr, WHAT: tl.constexpr, PRE: tl.constexpr, FILTERS: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Grid (R,): one row a program."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * row_stride
    temp = parameter(temperatures, temperature, r)
    k = count_parameter(top_ks, top_k, r)
    p = parameter(top_ps, top_p, r)
    least = parameter(min_ps, min_p, r)
    inv_t = inverse(temp)
    token = tl.full([], -1, tl.int32)
    logprob = tl.full([], 0.0, tl.float64)
    logsumexp = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], 0.0, tl.float32)
    fault = tl.full([], 16, tl.int32)
    if valid(temp, k, p, least):
        seed = tl.load(seeds + r)
        position = tl.load(positions + r)
        filtered = (temp > 0) & (((k > 0) & (k < v)) | (p < 1) | (least > 0))
        slot = r * tiles * WHAT
        top, threshold, logsumexp = row_law(
            row, v, tiles, tops + slot, sums + slot, temp, inv_t, k, p, least, filtered, seed,
            position, STREAM, WHAT, PRE, FILTERS, False, TILE, CHUNK, BLOCK, LOG_TILES,
        )  # fmt: skip
        fault = tl.where(finite(top), 0, 1)
        if fault > 0:
            threshold = tl.full([], 0.0, tl.float32)
        elif temp == 0:
            token = row_argmax(row, v, tops + slot, tiles, top, False, TILE, BLOCK)
            logsumexp = tl.full([], 0.0, tl.float64)
            threshold = top
        else:
            if WHAT == RACE:
                token = race(tops + slot, sums + slot, tiles, inv_t, TILE, BLOCK)
            else:
                u = uniform(seed, position, STREAM)
                token = draw(
                    row, v, tiles, tops + slot, sums + slot, top, threshold, inv_t, u, False,
                    TILE, BLOCK, LOG_TILES,
                )  # fmt: skip
            logprob = tl.load(row + token).to(tl.float64) / temp - logsumexp
    tl.store(tokens + r, token.to(tl.int64))
    tl.store(logprobs + r, logprob.to(tl.float32))
    tl.store(logsumexps + r, logsumexp)
    tl.store(thresholds + r, threshold)
    tl.store(status + r, fault)


def sample(*args: Any) -> tuple[Tensor, ...]:
    """`reference.sample` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    a = SampleArguments(*args)
    a.check()
    logits, out = a.logits, a.new_outputs()
    n, v = logits.shape
    if n == 0:
        return out
    shape = launch.tiling(v)
    what = RACE.value if a.method == "gumbel" else MASS.value
    split = launch.row_parallel(logits, n, shape.tiles)
    number = STREAMS[a.noise]
    tops, sums = launch.scratch(logits, n * what * shape.tiles)
    temps, seeds, positions = launch.packed(a.temperatures, a.seeds, a.positions)
    temperature = float32(a.temperature)
    filters = launch.filters(v, a.sampling)
    with launch.on_device_of(logits):
        if split:
            sample_tiles[(n, shape.tiles)](
                logits, logits.stride(0), v, shape.tiles, temps, temperature, seeds, positions,
                tops, sums, STREAM=number, WHAT=what, TILE=launch.TILE, **launch.OPTIONS,
            )  # fmt: skip
        sample_rows[(n,)](
            logits, logits.stride(0), v, shape.tiles, temps, temperature,
            *filters, seeds, positions, tops, sums, *out,
            STREAM=number, WHAT=what, PRE=split, FILTERS=launch.filtering(v, filters),
            TILE=launch.TILE, CHUNK=launch.CHUNK, BLOCK=shape.block, LOG_TILES=shape.log_tiles,
            **launch.OPTIONS,
        )  # fmt: skip
    return out
