"""Edge cases of the cache ops: `proofs.Case`s with buffers around their tensors.

The cases of `proofs` are small and serve every test of every op; these add all dtypes and layouts,
indices at and beyond the ends, and many caches.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from typing import NamedTuple

import pytest
import torch
from fuzz.calls import MAKERS
from fuzz.checks import comparable
from fuzz.values import Source
from proofs import Case, same
from simt import kv_emulator

from specdec_kernels import reference
from specdec_kernels.arguments.checks import dtype_name

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.int32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
LAYOUTS = ("contiguous", "sliced", "padded", "transposed")
# Layouts whose strides and start are multiples of 16 bytes, except for the one that is named.
ODD_LAYOUTS = ("odd-sequence", "odd-head", "odd-slot", "odd-start")
# Every layout with one dtype, and every other dtype with some layout.
DTYPES_AND_LAYOUTS = [
    *((DTYPES[0], layout) for layout in LAYOUTS),
    *((dtype, LAYOUTS[i % len(LAYOUTS)]) for i, dtype in enumerate(DTYPES[1:], 1)),
]
VECTOR_BYTES = 16  # the widest load of the kernels
FILLER = 77  # between the elements of strided integer arguments
HUGE = 2**63 - 1
HALF, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
INT32_MAX = 2**31 - 1
PROVIDERS = [
    "cpp",
    *(["cuda"] if kv_emulator.available else []),
    "indexing",
]
# Around the limits of the tables of caches in csrc/cuda/kv.
MANY_CACHES = (64, 65, 256, 257, 600)
# `make test` leaves these to `make test-all`.
FULL = {
    "cuda": ("256-caches", "600-caches"),
}


def each(cases):
    """(provider, case) parameters."""
    return [
        pytest.param(
            n, c, id=f"{n}-{c.op}{c}",
            marks=[pytest.mark.full] if c.id.startswith(FULL.get(n, ())) else [],
        )
        for n in PROVIDERS
        for c in cases
    ]  # fmt: skip


def embedded(size, dtype, layout, g):
    """A view [a, b, c, d] of random bytes inside a larger buffer, with the strides of a layout."""
    *_, b, c, d = size
    vector = VECTOR_BYTES // dtype.itemsize
    if layout in ODD_LAYOUTS:
        odd = ODD_LAYOUTS.index(layout)
        strides = [1, 1, 1, 1]
        for i, inner in ((2, d), (1, c), (0, b)):
            strides[i] = -(-inner * strides[i + 1] // vector) * vector + (i == odd)
        order, start, count = (0, 1, 2, 3), (0, 0, 0, int(odd == 3)), strides[0] * size[0]
    else:
        wide, order, start = _surrounding(size, vector, layout)
        strides = [1, 1, 1, 1]
        for i in (2, 1, 0):
            strides[i] = strides[i + 1] * wide[i + 1]
        count = strides[0] * wide[0]
    raw = torch.randint(0, 256, ((count + 16) * dtype.itemsize,), dtype=torch.uint8, generator=g)
    offset = sum(i * stride for i, stride in zip(start, strides, strict=True))
    return raw.view(dtype).as_strided(size, [strides[i] for i in order], offset)


def _surrounding(size, vector, layout):
    """(size of the buffer, order of its dimensions in the view, index of the first element)."""
    a, b, c, d = size
    if layout == "contiguous":
        return size, (0, 1, 2, 3), (0, 0, 0, 0)
    if layout == "sliced":  # odd offsets, so that kernels have to use the narrowest loads
        return (a + 1, b + 2, c + 3, d + 3), (0, 1, 2, 3), (1, 1, 2, 1)
    if layout == "padded":  # aligned rows, so that kernels may use the widest loads
        wide = (a + 1, b + 1, c + 1, -(-d // vector) * vector + vector)
        return wide, (0, 1, 2, 3), (0, 1, 1, 0)
    assert layout == "transposed"  # the output of a projection, [B, S, H, D]
    return (a, c, b, d), (0, 2, 1, 3), (0, 0, 0, 0)


def integers(values, shape, dtype=torch.int64, step=1):
    """An integer argument with `step` between elements, inside a larger buffer."""
    row = shape[-1] * step + (3 if step > 1 else 0)
    strides = (row, step) if len(shape) == 2 else (step,)
    count = shape[0] * (row if len(shape) == 2 else step) + 4
    view = torch.full((count,), FILLER, dtype=dtype).as_strided(shape, strides, 2)
    return view.copy_(torch.tensor(values, dtype=torch.int64).to(dtype).reshape(shape))


def far_apart(device="cpu"):
    """A cache [2, 2, 3, 8] of int8 whose sequences are more than 2^31 elements apart.

    Only the pages of its rows take memory, because nothing else is written.
    """
    step = 2**31 + 2**20
    buffer = torch.empty(step + 2**12, dtype=torch.int8, device=device)
    view = buffer.as_strided((2, 2, 3, 8), (step, 64, 16, 1), 32)
    view.fill_(5)
    return view


def check_far_apart(append, truncate, device="cpu"):
    """kv_append_ and kv_truncate_ compute addresses in 64 bits."""
    view = far_apart(device)
    want = torch.full(view.shape, 5, dtype=torch.int8)
    new = torch.arange(32, dtype=torch.int8).view(2, 2, 1, 8)
    for values in ([1, 2], [2, 0]):
        positions = torch.tensor(values)
        reference.kv_append_([want], [new], positions)
        append([view], [new.to(device)], positions.to(device))
    same("cache", view, want)
    lengths, new_lengths = torch.tensor([3, 3]), torch.tensor([2, 1])
    truncate([view], lengths.clone().to(device), new_lengths.to(device), True)
    reference.kv_truncate_([want], lengths, new_lengths, True)
    same("cache", view, want)


class Ints(NamedTuple):
    """An integer argument that lies inside a larger buffer."""

    values: list
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64


def vectors(*columns):
    return [Ints(column, (len(column),)) for column in columns]


def matrix(rows, dtype=torch.int64):
    return Ints(rows, (len(rows), len(rows[0])), dtype)


def made(op, name, caches, *rest, entries=None, dtype=F32, layout="contiguous",
         entry_layout=None, step=1):  # fmt: skip
    """A case with random bytes in caches and entries of these sizes.

    rest: the arguments after them; `step` is the stride of those that are `Ints`.
    """

    def build(g):
        out = [] if caches is None else [[embedded(s, dtype, layout, g) for s in caches]]
        if entries is not None:
            out.append([embedded(s, dtype, entry_layout or layout, g) for s in entries])
        return (*out, *(integers(*x, step) if isinstance(x, Ints) else x for x in rest))

    return Case(op, name, build)


def columns_of(pairs):
    return [*map(list, zip(*pairs, strict=True))]


def filled(name, fill):
    return f"{name}-{'fill' if fill else 'keep'}"


def every_layout(case, shapes, *rest, **more):
    """The case with every dtype and layout, and with each stride odd."""
    return [
        *(case(f"{dtype_name(dtype)}-{layout}", shapes, *rest, dtype=dtype, layout=layout, **more)
          for dtype, layout in DTYPES_AND_LAYOUTS),
        *(case(odd, shapes[:1], *rest, dtype=HALF, layout=odd, **more) for odd in ODD_LAYOUTS),
    ]  # fmt: skip


def many_caches(name, of_entries=False):
    """(name, shapes) of many small caches (H, S, D), or (H, S, n, D)."""
    for count in MANY_CACHES:
        r = random.Random(zlib.crc32(name.encode()))
        sizes = [(r.randint(1, 4), r.randint(1, 9), r.randint(0, 5), r.choice((1, 2, 3, 8, 16, 65)))
                 for _ in range(count)]  # fmt: skip
        yield f"{count}-caches", sizes if of_entries else [(h, s, d) for h, s, _, d in sizes]


UNEVEN = [(1, 5 + i % 4, 4) for i in range(257)]
EMPTY = [(0, 5, 2), (2, 0, 2), (2, 5, 0)]  # H, S and D of 0

# kv_append_


def append(name, shapes, positions, dtype=F32, layout="contiguous", entry_layout=None, step=1):
    """shapes: (H, S, n, D) of each cache and its n new entries."""
    b = len(positions)
    return made(
        "kv_append_", name, [(b, h, s, d) for h, s, _, d in shapes], *vectors(positions),
        entries=[(b, h, n, d) for h, _, n, d in shapes], dtype=dtype, layout=layout,
        entry_layout=entry_layout, step=step,
    )  # fmt: skip


def _edges(s, n):
    """Positions inside, at both ends, half out on each side, wholly out, and huge."""
    return [0, s - n, 1 - n, -n, s - 1, s, -1, HUGE, -HUGE - 1, HUGE - n + 1]


@functools.cache
def append_cases():
    small, wide = [(3, 7, 3, 16)], [(3, 7, 3, 24)]
    pairs = [p for odd in ODD_LAYOUTS for p in ((odd, "padded"), ("padded", odd))]
    return [
        *every_layout(append, [(2, 9, 4, 16), (3, 9, 4, 3)], _edges(9, 4)),
        *(append(f"D{d}", [(2, 7, 3, d)], _edges(7, 3), HALF) for d in (1, 3, 65, 128)),
        *(append(f"{a}-cache-{b}-entries", small, _edges(7, 3), HALF, a, b) for a, b in pairs),
        *(append(f"{a}-cache-{b}-entries", wide, _edges(7, 3), HALF, a, b)
          for a, b in (("sliced", "transposed"), ("padded", "contiguous"))),
        append("strided-positions", [(2, 7, 3, 8)], _edges(7, 3), step=3),
        append("S1", [(2, 1, 1, 8), (2, 1, 3, 8)], _edges(1, 1)),
        append("n-above-S", [(2, 3, 11, 8)], _edges(3, 11)), append("B0-no-caches", [], []),
        append("no-caches", [], [0, 1]),
        append("H0-S0-D0", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 2, 0)], [0, 1]),
        append("n0-beside-others", [(2, 5, 0, 8), (2, 5, 2, 8), (0, 5, 2, 8)], [0, 4]),
        append("batch-of-one", [(1, 9, 4, 128)], [3], BF16, "transposed"),
        *(append(*many, [-1, 2, 5], HALF) for many in many_caches("append", of_entries=True)),
    ]  # fmt: skip


# Ops on caches [B, H, S, D] of lengths or positions: shapes are (H, S, D) of each cache.


def truncate(name, shapes, lengths, new_lengths, dtype=F32, layout="contiguous", *, fill=True,
             step=1):  # fmt: skip
    caches = [(len(lengths), *shape) for shape in shapes]
    return made("kv_truncate_", filled(name, fill), caches, *vectors(lengths, new_lengths), fill,
                dtype=dtype, layout=layout, step=step)  # fmt: skip


def _old_and_new(s):
    """(lengths, new_lengths): shorter, equal, longer, empty, negative, beyond S, huge."""
    return columns_of([
        *((s, s - 2), (s, s), (s - 1, s + 3), (3, 0), (0, 0), (2, -5), (-3, 1), (-3, -9)),
        *((s + 4, s - 1), (s + 4, s + 1), (HUGE, 1), (-HUGE - 1, HUGE), (HUGE, -HUGE - 1)),
        (HUGE, HUGE - 1),
    ])  # fmt: skip


@functools.cache
def truncate_cases():
    return [
        case
        for fill in (True, False)
        for cut in [functools.partial(truncate, fill=fill)]
        for case in (
            *every_layout(cut, [(2, 9, 16), (3, 9, 3)], *_old_and_new(9)),
            *(cut(f"D{d}", [(2, 7, d)], *_old_and_new(7), HALF) for d in (1, 3, 65, 128)),
            cut("strided-lengths", [(2, 7, 8)], *_old_and_new(7), step=3),
            cut("S1", [(2, 1, 8)], *_old_and_new(1)),
            cut("no-caches", [], [4, 1], [2, 3]),
            cut("H0-S0-D0", EMPTY, [3, 4], [1, 0]),
            cut("long-drop", [(2, 300, 32)], [300, 290], [0, 5], HALF, "transposed"),
            *(cut(*many, [4, 9, 7], [1, 9, -2], HALF) for many in many_caches("cut")),
        )
    ]


@functools.cache
def large_cases():
    """One case of kv_append_ and one of kv_truncate_ with many rows."""
    return [
        append("many-rows", [(8, 900, 600, 128)], [-7, 400, 890], BF16),
        truncate("many-rows", [(8, 900, 128)], [900, 700, 3], [1, 699, 3], BF16, "transposed"),
    ]


def random_case(op, seed):
    """A random call of the fuzzer, one whose arguments share no memory."""

    def build(_):
        calls = (MAKERS[op](Source(seed, i)) for i in itertools.count())
        arguments = (tuple(call.arguments.values()) for call in calls)
        return next(filter(comparable, arguments))

    return Case(op, f"random-{seed}", build)


def realign(name, shapes, moves, *, fill=True, **more):
    """A shift of each sequence; moves: (start, length, shift)."""
    caches = [(len(moves), *shape) for shape in shapes]
    return made("kv_realign_", filled(name, fill), caches, *vectors(*columns_of(moves)), fill,
                **more)  # fmt: skip


@functools.cache
def realign_cases():
    some = [(0, 9, 2), (2, 5, -2), (1, 6, 1), (3, 6, -1), (0, 4, 4), (4, 4, -4), (2, 3, 0),
            (-2, 6, 3), (5, 9, -3), (0, 9, 9), (0, 9, -9), (7, 2, -7), (2, -1, 3), (0, 2, 7),
            (0, HUGE, 1), (-HUGE - 1, HUGE, 3), (4, 3, HUGE), (4, 3, -HUGE - 1),
            (HUGE, HUGE, HUGE), (-100, 50, 1), (-3, HUGE, -2), (2, 4, -1)]  # fmt: skip
    every = itertools.product(range(-2, 6), range(-1, 8), range(-5, 6))
    long = [(0, 280, 1), (20, 280, -17), (0, 150, 150)]
    return [
        *(case for fill in (False, True) for case in (
            *every_layout(realign, [(2, 9, 16), (3, 9, 3)], some, fill=fill),
            realign("strided", [(2, 9, 1), (1, 5, 8)], some, step=3, fill=fill),
        )),
        realign("every", [(1, 4, 3)], list(every), dtype=torch.int8),
        realign("no-caches", [], some), realign("H0-S0-D0", EMPTY, [(0, 3, 1)]),
        realign("long", [(2, 300, 32)], long, dtype=HALF),
        realign("65-caches", UNEVEN[:65], [(0, 4, 2), (2, 4, -2)]),
        realign("257-caches", UNEVEN, [(0, 4, 2), (2, 4, -2)]),
    ]  # fmt: skip


def ring(name, shapes, pairs, window, *, fill=True, **more):
    """pairs: (length, new length) of each sequence."""
    caches = [(len(pairs), *shape) for shape in shapes]
    return made("ring_truncate_", filled(f"{name}-W{window}", fill), caches,
                *vectors(*columns_of(pairs)), window, fill, **more)  # fmt: skip


@functools.cache
def ring_cases():
    some = [(9, 7), (9, 9), (13, 9), (20, 18), (20, 11), (20, 2), (13, 0), (4, 1), (9, 12), (-3, 2),
            (5, -5), (0, 0), (HUGE, HUGE - 2), (HUGE, 3), (HUGE, -HUGE - 1),
            (-HUGE - 1, HUGE)]  # fmt: skip
    every = [(old, new) for old in range(12) for new in range(-1, 13)]
    return [
        *every_layout(ring, [(2, 9, 16), (3, 7, 3)], some, 4),
        *(ring("every", [(1, 3, 2)], every, w, dtype=torch.int8) for w in (1, 2, 3)),
        ring("whole", [(3, 9, 16)], some, 9, dtype=HALF),
        ring("plain", [(2, 9, 16)], some, 4, fill=False),
        ring("strided", [(2, 9, 1)], some, 4, step=3),
        ring("no-caches", [], some, 4),
        ring("H0-D0", [(0, 5, 2), (2, 6, 0)], some, 5),
        ring("smallest-first", [(2, 7, 3), (2, 9, 16)], [(13, 9), (20, 15), (9, 7)], 4),
        ring("257-caches", UNEVEN, [(9, 7), (20, 16)], 3),
    ]


# Ops that take an accepted path.

# (base, path) around a cache of nine slots: in place, broken, out of range, huge.
PATHS = [
    *((0, [0, 1, 2, 3, 4]), (2, [0, 2, 5, -1, -1]), (2, [0, 2, 6, 7, -1]), (1, [1, 2, 3, 4, 5])),
    *((3, [0, 3, 3, 4, -1]), (3, [0, 4, 2, 5, -1]), (3, [-1, 2, 3, 4, 5]), (-1, [0, 2, 3, 4, 5])),
    *((9, [0, 1, 2, 3, 4]), (8, [0, 1, 2, 3, 4]), (HUGE, [0, 2, 3, 4, 5]), (0, [4, 5, 6, 7, 8])),
    *((-HUGE - 1, [0, 1, 2, 3, 4]), (4, [0, INT32_MAX, INT32_MAX, 4, 5]), (2, [0, -1, 3, 4, 5])),
    *((5, [2, 3, -1, -1, -1]), (0, [0, 1, 3, 4, 8]), (7, [1, -9, 2, 3, 4]), (1, [0, 2, 4, 6, 7])),
]


def compact(name, shapes, paths, ids=torch.int64, **more):
    """shapes: (H, S, D) of each cache; paths: (base, path) of each sequence."""
    base, path = columns_of(paths)
    return made("kv_compact_", name, [(len(paths), *shape) for shape in shapes], *vectors(base),
                matrix(path, ids), **more)  # fmt: skip


@functools.cache
def compact_cases():
    two = [(1, [0, 2, 3]), (3, [1, 2, 5])]
    transposed = dict(dtype=HALF, layout="transposed")
    return [
        *every_layout(compact, [(2, 9, 16), (3, 9, 3)], PATHS, ids=torch.int32),
        *(compact(f"D{d}", [(2, 9, d), (1, 7, d), (2, 12, d)], PATHS, dtype=HALF)
          for d in (1, 3, 65, 128)),
        compact("strided-ids", [(2, 9, 8)], PATHS, step=3),
        compact("strided-int32", [(2, 9, 8)], PATHS, torch.int32, step=2, **transposed),
        compact("scales", [(2, 9, 16), (2, 9, 1), (1, 9, 1)], PATHS, dtype=torch.int8),
        compact("no-caches", [], [(0, [0, 2]), (1, [1, 2])]),
        compact("H0-S0-D0", EMPTY, [(0, [1, 2])]),
        compact("beside-empty", [(0, 5, 2), (2, 5, 2)], [(0, [1, 2])]),
        compact("batch-of-one", [(1, 9, 128)], [(3, [1, 2, 5])], **transposed),
        *(compact(*many, two, dtype=HALF) for many in many_caches("compact")),
    ]  # fmt: skip


@functools.cache
def every_path(slots=4, length=3):
    """One case of kv_compact_ with all bases and paths around a cache of a few slots."""
    nodes = itertools.product(range(-1, slots + 1), repeat=length)
    paths = [*itertools.product(range(-1, slots + 1), map(list, nodes))]
    return compact("every-path", [(1, slots, 3)], paths, dtype=torch.int8)


# Paged caches [blocks, size, H, D], of which heads are (H, D); with layout "transposed" memory is
# in the order [blocks, H, size, D].


def distinct_blocks(r, b, m, blocks, faults):
    """Block tables [b, m] of different blocks in random order; faults: (row, column, block)."""
    drawn = r.sample(range(blocks), b * m)
    tables = [drawn[i * m : (i + 1) * m] for i in range(b)]
    for row, column, block in faults:
        tables[row][column] = block
    return tables


def paged_append(name, heads, n, tables, positions, counts=None, pool=(60, 4), ids=torch.int32,
                 **more):  # fmt: skip
    """n: entries of each sequence. ids: the dtype of tables."""
    where, *ragged = vectors(positions, *([] if counts is None else [counts]))
    return made(
        "paged_append_", name, [(*pool, *head) for head in heads], matrix(tables, ids), where,
        *(ragged or [None]), entries=[(len(tables), n, *head) for head in heads], **more,
    )  # fmt: skip


@functools.cache
def paged_append_cases():
    r = random.Random(1)
    positions = [0, 5, 8, 7, 11, 12, 13, -1, -3, -4, HUGE, -HUGE - 1, HUGE - 3, 2, 4, 0, 3]
    counts = [4, 3, 2, 1, 4, 4, 4, 4, 2, 4, 4, 4, 4, 0, -1, HUGE, -HUGE - 1]
    faults = [(1, 1, -1), (2, 1, 60), (3, 1, -7), (15, 1, INT32_MAX)]
    tables = distinct_blocks(r, len(positions), 3, 60, faults)
    huge = [[t if 0 <= t < 60 else r.choice((HUGE, -HUGE - 1, 2**32 + 3)) for t in row]
            for row in tables]  # fmt: skip
    one, small = [(2, 8)], dict(pool=(5, 4))

    def edges(name, heads, *, counts=counts, **more):
        return paged_append(name, heads, 4, tables, positions, counts, **more)

    pairs = [p for odd in ODD_LAYOUTS for p in ((odd, "padded"), ("padded", odd))]
    pairs.append(("padded", "contiguous"))
    return [
        *every_layout(edges, [(2, 16), (3, 3)]),
        *(edges(f"{a}-cache-{b}-entries", [(3, 16)], dtype=HALF, layout=a,
                entry_layout=b)
          for a, b in pairs),
        edges("contiguous-cache-odd-head-entries", [(3, 16)], dtype=HALF, entry_layout="odd-slot"),
        edges("uncounted", one, counts=None),
        edges("strided", [(2, 8), (2, 1)], dtype=HALF, step=3),
        edges("blocks-of-1", one, pool=(60, 1)), edges("blocks-of-64", one, pool=(60, 64)),
        paged_append("huge-blocks", one, 4, huge, positions, counts, ids=torch.int64),
        paged_append("no-caches", [], 3, [[0, 1]], [0], **small),
        paged_append("no-blocks", one, 3, [[0, 1]], [0], pool=(0, 4)),
        paged_append("blocks-of-0", one, 3, [[0, 1]], [0], pool=(3, 0)),
        paged_append("one-block", one, 3, [[0], [0]], [3, 0], pool=(1, 16), dtype=HALF,
                     layout="padded", entry_layout="odd-sequence"),
        paged_append("65-caches", [(1 + i % 3, 4) for i in range(65)], 3, [[4, 0]], [2], [3],
                     **small),
    ]  # fmt: skip


def paged_compact(name, heads, tables, paths, pool=(60, 4), ids=torch.int64, **more):
    base, path = columns_of(paths)
    return made("paged_compact_", name, [(*pool, *head) for head in heads],
                matrix(tables, torch.int32), *vectors(base), matrix(path, ids),
                **more)  # fmt: skip


@functools.cache
def paged_compact_cases():
    faults = [(4, 0, -1), (1, 2, 60), (11, 1, -7), (16, 2, INT32_MAX)]
    tables = distinct_blocks(random.Random(2), len(PATHS), 3, 60, faults)
    one, pair, small = [(2, 8)], [(0, [1, 2])], dict(pool=(5, 4))

    def edges(name, heads, **more):
        return paged_compact(name, heads, tables, PATHS, **more)

    return [
        *every_layout(edges, [(2, 16), (3, 3)], ids=torch.int32),
        edges("strided", [(2, 8), (2, 1)], dtype=HALF, step=3),
        edges("blocks-of-1", one, pool=(60, 1)), edges("blocks-of-64", one, pool=(60, 64)),
        paged_compact("no-caches", [], [[0, 1]], pair, **small),
        paged_compact("no-blocks", one, [[0, 1]], pair, pool=(0, 4)),
        paged_compact("blocks-of-0", one, [[0, 1]], pair, pool=(3, 0)),
        paged_compact("one-block", one, [[0]], [(3, [1, 2, 5])], pool=(1, 16), dtype=HALF),
        paged_compact("65-caches", [(1 + i % 3, 4) for i in range(65)], [[4, 0]],
                      [(1, [0, 2, 5])], **small),
    ]  # fmt: skip


def paged_truncate(name, tables, old, new, size, step=1):
    return made("paged_truncate_", name, None, matrix(tables, torch.int32), *vectors(old, new),
                size, step=step)  # fmt: skip


@functools.cache
def paged_truncate_cases():
    pairs = [(old, new) for old in range(-1, 19) for new in range(-1, 20)]
    pairs += [(HUGE, 3), (HUGE, -HUGE - 1), (-HUGE - 1, HUGE), (HUGE, HUGE - 1), (HUGE, HUGE)]
    lengths, r = columns_of(pairs), random.Random(3)
    tables = [[r.choice((-1, r.randint(0, 99), 7)) for _ in range(5)] for _ in pairs]
    long = [[r.randint(-1, 9) for _ in range(200)] for _ in range(3)]
    many = [[i, i + 1] for i in range(3000)]
    return [
        *(paged_truncate(f"size-{n}", tables, *lengths, n) for n in (1, 3, 4, 16, HUGE)),
        paged_truncate("strided", tables, *lengths, 4, 3),
        paged_truncate("long", long, [800, 790, 3], [2, 150, 1], 4),
        paged_truncate("many-sequences", many, [8] * 3000, [4] * 3000, 4),
    ]


def all_cases():
    """The edge cases of all cache ops."""
    return [
        *(*append_cases(), *truncate_cases(), *compact_cases(), every_path()),
        *(*paged_append_cases(), *paged_compact_cases(), *paged_truncate_cases()),
        *(*realign_cases(), *ring_cases()),
    ]
