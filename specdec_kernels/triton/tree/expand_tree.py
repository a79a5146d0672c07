"""`specdec_kernels::expand_tree` in Triton.

A candidate is one int64, an entry: the ordered bits of its value in the upper half, its index,
inverted, in the lower half. The largest entry is then the first of the best candidates, and the
best of a row can be found tile by tile, in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...arguments.checks import float32
from .. import launch
from ..row.filter import key_of, value_of
from ..row.tile import (
    INF,
    Row,
    TileStats,
    exp_units,
    exp_weights,
    finite,
    inverse,
    load_logits,
    parameter,
    row_maximum,
    row_total,
)

NOTHING = tl.constexpr(-(2**63))  # below every entry
LAST = tl.constexpr(0x7FFFFFFF)  # the lower of two indices makes the larger entry
CHUNK = 4096  # entries that one step of a merge takes


@triton.jit
def entries_of(values, index):
    return (key_of(values).to(tl.int64) << 32) | (index ^ LAST).to(tl.int64)


@triton.jit
def index_of(entries):
    return (entries & LAST) ^ LAST


@triton.jit
def load_entries(entries, index, inside):
    return tl.where(inside, tl.load(entries + index, mask=inside, other=0), NOTHING)


@triton.jit
def keep_best(best, entries, width, PLACES: tl.constexpr):
    """[PLACES]: the `width` largest of `best` [PLACES] and `entries`, largest first."""
    place = tl.arange(0, PLACES)
    least = tl.min(tl.where(place == width - 1, best, -NOTHING - 1), 0)
    if tl.max(entries, 0) > least:
        kept = tl.full([PLACES], NOTHING, tl.int64)
        for j in range(0, width):
            largest = tl.maximum(tl.max(best, 0), tl.max(entries, 0))
            kept = tl.where(place == j, largest, kept)
            best = tl.where(best == largest, NOTHING, best)
            entries = tl.where(entries == largest, NOTHING, entries)
        best = kept
    return best


@triton.jit
def used_temperature(temperatures, temperature, b):
    """The float64 temperature of sequence b; 0 counts as 1."""
    value = parameter(temperatures, temperature, b)
    return tl.where(value == 0, 1.0, value)


@launch.kernel("logits", "logits_stride_b", "logits_stride_f", "v")
def expand_tiles(
    logits, logits_stride_b, logits_stride_f, v, num_nodes, tiles, width, temperatures, temperature,
    tile_maxima, tile_sums, found, TILE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Grid (B * F, tiles): maximum, mass and best entries of one tile."""
    r = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    b = r // num_nodes
    row = logits + b * logits_stride_b + r % num_nodes * logits_stride_f
    values = load_logits(Row(row, row), tile, v, False, TILE)
    maximum = tl.max(values, 0)
    inv_t = inverse(used_temperature(temperatures, temperature, b))
    units = exp_units(exp_weights(values, maximum, float("-inf"), inv_t))
    tl.store(tile_maxima + r * tiles + tile, maximum)
    tl.store(tile_sums + r * tiles + tile, tl.sum(units, 0))
    index = tile * TILE + tl.arange(0, TILE)
    entries = tl.where(values > -INF, entries_of(values, index), NOTHING)
    best = keep_best(tl.full([PLACES], NOTHING, tl.int64), entries, width, PLACES)
    place = tl.arange(0, PLACES)
    tl.store(found + (r * tiles + tile) * width + place, best, mask=place < width)


@launch.kernel()
def expand_rows(
    scores, score_stride_b, score_stride_f, num_nodes, tiles, width, temperatures, temperature,
    tile_maxima, tile_sums, found, out_tokens, out_scores,
    BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, CHUNK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Grid (B * F,): the best children of one node, merged from those of its tiles."""
    r = tl.program_id(0).to(tl.int64)
    b = r // num_nodes
    parent_score = tl.load(scores + b * score_stride_b + r % num_nodes * score_stride_f)
    temp = used_temperature(temperatures, temperature, b)
    place = tl.arange(0, PLACES)
    token = tl.full([PLACES], -1, tl.int64)
    score = tl.full([PLACES], float("-inf"), tl.float32)
    stats = TileStats(tile_maxima + r * tiles, tile_sums + r * tiles, tiles)
    maximum = row_maximum(stats, BLOCK)
    if finite(maximum) & finite(parent_score) & (temp > 0) & (temp < INF):
        mass = row_total(stats, maximum, inverse(temp), False, LOG_TILES, BLOCK)
        total = tl.log(mass.to(tl.float64) * (2.0 ** (LOG_TILES - 50)))
        best = tl.full([PLACES], NOTHING, tl.int64)
        for start in range(0, tiles * width, CHUNK):
            index = start + tl.arange(0, CHUNK)
            inside = index < tiles * width
            entries = load_entries(found + r * tiles * width, index, inside)
            best = keep_best(best, entries, width, PLACES)
        gap = (value_of((best >> 32).to(tl.int32)).to(tl.float64) - maximum.to(tl.float64)) / temp
        child = (parent_score.to(tl.float64) + (gap - total)).to(tl.float32)
        there = (best != NOTHING) & (child > -INF)
        token = tl.where(there, index_of(best), -1)
        score = tl.where(there, child, -INF)
    tl.store(out_tokens + r * width + place, token, mask=place < width)
    tl.store(out_scores + r * width + place, score, mask=place < width)


@launch.kernel()
def choose_frontier(
    scores, frontier, children, width, CHUNK: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """Grid (B,): the best children of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    best = tl.full([PLACES], NOTHING, tl.int64)
    for start in range(0, children, CHUNK):
        index = start + tl.arange(0, CHUNK)
        inside = index < children
        score = tl.load(scores + b * children + index, mask=inside, other=0.0)
        entries = tl.where(inside, entries_of(score, index), NOTHING)
        best = keep_best(best, entries, width, PLACES)
    place = tl.arange(0, PLACES)
    tl.store(frontier + b * width + place, index_of(best), mask=place < width)


def expand_tree(
    logits: Tensor, scores: Tensor, width: int, temperatures: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.expand_tree` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    b, f, v = logits.shape
    tokens = logits.new_empty((b, f, width), dtype=torch.int64)
    out_scores = logits.new_empty((b, f, width), dtype=torch.float32)
    frontier = logits.new_empty((b, width), dtype=torch.int64)
    if b == 0:
        return tokens, out_scores, frontier
    shape = launch.tiling(v)
    maxima, sums = launch.scratch(logits, b * f * shape.tiles)
    found = logits.new_empty((b * f * shape.tiles * width,), dtype=torch.int64)
    (temps,) = launch.packed(temperatures)
    temperature = float32(temperature)
    places = triton.next_power_of_2(width)
    with launch.on_device_of(logits):
        expand_tiles[(b * f, shape.tiles)](
            logits, logits.stride(0), logits.stride(1), v, f, shape.tiles, width, temps,
            temperature, maxima, sums, found, TILE=launch.TILE, PLACES=places, **launch.OPTIONS,
        )  # fmt: skip
        expand_rows[(b * f,)](
            scores, scores.stride(0), scores.stride(1), f, shape.tiles, width, temps, temperature,
            maxima, sums, found, tokens, out_scores, BLOCK=shape.block, LOG_TILES=shape.log_tiles,
            CHUNK=CHUNK, PLACES=places, **launch.OPTIONS,
        )  # fmt: skip
        choose_frontier[(b,)](
            out_scores, frontier, f * width, width, CHUNK=CHUNK, PLACES=places, **launch.OPTIONS
        )
    return tokens, out_scores, frontier
