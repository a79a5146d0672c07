"""Edge cases of the cache ops that take an accepted path or a block table; see kv_cases.py."""

from __future__ import annotations

import functools
import itertools

import torch
from proofs import Case
from support.kv_buffers import (
    DTYPES_AND_LAYOUTS,
    HUGE,
    ODD_LAYOUTS,
    embedded,
    integers,
)
from support.kv_cases import (
    HALF,
    MANY_CACHES,
    caches_of,
    realign_cases,
    ring_cases,
    seeded,
    vectors,
)

from specdec_kernels.arguments.checks import dtype_name

INT32_MAX = 2**31 - 1
# (base, path) around a cache of nine slots: in place, broken, out of range, huge.
PATHS = [
    *((0, [0, 1, 2, 3, 4]), (2, [0, 2, 5, -1, -1]), (2, [0, 2, 6, 7, -1]), (1, [1, 2, 3, 4, 5])),
    *((3, [0, 3, 3, 4, -1]), (3, [0, 4, 2, 5, -1]), (3, [-1, 2, 3, 4, 5]), (-1, [0, 2, 3, 4, 5])),
    *((9, [0, 1, 2, 3, 4]), (8, [0, 1, 2, 3, 4]), (HUGE, [0, 2, 3, 4, 5]), (0, [4, 5, 6, 7, 8])),
    *((-HUGE - 1, [0, 1, 2, 3, 4]), (4, [0, INT32_MAX, INT32_MAX, 4, 5]), (2, [0, -1, 3, 4, 5])),
    *((5, [2, 3, -1, -1, -1]), (0, [0, 1, 3, 4, 8]), (7, [1, -9, 2, 3, 4]), (1, [0, 2, 4, 6, 7])),
]


def path_tensor(path, ids, step):
    return integers(path, (len(path), len(path[0]) if path else 0), ids, step)


# kv_compact_


def compact(name, shapes, base, path, dtype=torch.float32, layout="contiguous", ids=torch.int64,
            step=1):  # fmt: skip
    """A case of kv_compact_. shapes: (H, S, D) of each cache; ids: the dtype of the path."""

    def build(g):
        b = len(base)
        caches = caches_of(b, shapes, dtype, layout, g)
        return (caches, *vectors([base], b, step), path_tensor(path, ids, step))

    return Case("kv_compact_", name, build)


@functools.cache
def compact_cases():
    base, path = map(list, zip(*PATHS, strict=True))

    def edges(name, shapes, *args, **kwargs):
        return compact(name, shapes, base, path, *args, **kwargs)

    cases = [
        edges(f"{dtype_name(dtype)}-{layout}", [(2, 9, 16), (3, 9, 3)], dtype, layout, torch.int32)
        for dtype, layout in DTYPES_AND_LAYOUTS
    ]
    cases += [edges(f"D{d}", [(2, 9, d), (1, 7, d), (2, 12, d)], HALF) for d in (1, 3, 65, 128)]
    cases += [edges(odd, [(3, 9, 16)], HALF, odd) for odd in ODD_LAYOUTS]
    cases += [
        edges("strided-ids", [(2, 9, 8)], step=3),
        edges("strided-int32", [(2, 9, 8)], HALF, "transposed", torch.int32, 2),
        edges("scales", [(2, 9, 16), (2, 9, 1), (1, 9, 1)], torch.int8),
        compact("B0", [(2, 5, 8)], [], []),
        compact("P0", [(2, 5, 8)], [0, 1], [[], []]),
        compact("no-caches", [], [0, 1], [[0, 2], [1, 2]]),
        compact("H0-S0-D0", [(0, 5, 2), (2, 0, 2), (2, 5, 0)], [0], [[1, 2]]),
        compact("beside-empty", [(0, 5, 2), (2, 5, 2)], [0], [[1, 2]]),
        compact("batch-of-one", [(1, 9, 128)], [3], [[1, 2, 5]], HALF, "transposed"),
    ]
    for count in MANY_CACHES:
        r = seeded("compact")
        shapes = [(r.randint(1, 3), r.randint(1, 9), r.choice((1, 3, 8, 16))) for _ in range(count)]
        cases.append(compact(f"{count}-caches", shapes, [1, 3], [[0, 2, 3], [1, 2, 5]], HALF))
    return cases


@functools.cache
def every_path(slots=4, length=3):
    """One case of kv_compact_ with all bases and paths around a cache of a few slots."""
    nodes = itertools.product(range(-1, slots + 1), repeat=length)
    pairs = [*itertools.product(range(-1, slots + 1), map(list, nodes))]
    base, path = map(list, zip(*pairs, strict=True))
    return compact("every-path", [(1, slots, 3)], base, path, torch.int8)


# paged_append_


def block_tables(tables, width, step=1, dtype=torch.int32):
    """[B, M]; width: M if there is no sequence."""
    return integers(tables, (len(tables), len(tables[0]) if tables else width), dtype, step)


def paged_append(name, blocks, size, heads, n, tables, positions, counts=None,
                 dtype=torch.float32, layout="contiguous", entry_layout=None, ids=torch.int32,
                 step=1):  # fmt: skip
    """A case of paged_append_; the arguments are those of `paged_compact`, ids the dtype of tables.

    n: entries of each sequence.
    """

    def build(g):
        b = len(tables)
        caches = [embedded((blocks, size, h, d), dtype, layout, g) for h, d in heads]
        entries = [embedded((b, n, h, d), dtype, entry_layout or layout, g) for h, d in heads]
        where = vectors([positions, positions if counts is None else counts], b, step)
        ragged = None if counts is None else where[1]
        return caches, entries, block_tables(tables, 2, step, ids), where[0], ragged

    return Case("paged_append_", name, build)


@functools.cache
def paged_append_cases():
    r = seeded("paged append")
    positions = [0, 5, 8, 7, 11, 12, 13, -1, -3, -4, HUGE, -HUGE - 1, HUGE - 3, 2, 4, 0, 3]
    counts = [4, 3, 2, 1, 4, 4, 4, 4, 2, 4, 4, 4, 4, 0, -1, HUGE, -HUGE - 1]
    tables = distinct_blocks(r, len(positions), 3, 60)
    for row, bad in ((1, -1), (2, 60), (3, -7), (15, INT32_MAX)):
        tables[row][1] = bad

    def edges(name, heads, *args, size=4, counts=counts, **kwargs):
        return paged_append(name, 60, size, heads, 4, tables, positions, counts, *args, **kwargs)

    huge = [[t if 0 <= t < 60 else r.choice((HUGE, -HUGE - 1, 2**32 + 3)) for t in row]
            for row in tables]  # fmt: skip
    cases = [
        edges(f"{dtype_name(dtype)}-{layout}", [(2, 16), (3, 3)], dtype, layout)
        for dtype, layout in DTYPES_AND_LAYOUTS
    ]
    for odd in ODD_LAYOUTS:
        for pair in ((odd, "padded"), ("padded", odd)):
            cases.append(edges(f"{pair[0]}-cache-{pair[1]}-entries", [(3, 16)], HALF, *pair))
    one = [(2, 8)]
    uneven = [(1 + i % 3, 4) for i in range(65)]
    return [
        *cases,
        edges("padded-cache-contiguous-entries", [(3, 24)], HALF, "padded", "contiguous"),
        edges("contiguous-cache-odd-head-entries", [(3, 16)], HALF, "contiguous", "odd-slot"),
        edges("uncounted", one, counts=None),
        edges("strided", [(2, 8), (2, 1)], HALF, step=3),
        edges("blocks-of-1", one, size=1),
        edges("blocks-of-64", one, size=64),
        paged_append("huge-blocks", 60, 4, one, 4, huge, positions, counts, ids=torch.int64),
        paged_append("B0", 5, 4, one, 3, [], []),
        paged_append("n0", 5, 4, one, 0, [[0, 1]], [2]),
        paged_append("M0", 5, 4, one, 3, [[]], [0]),
        paged_append("no-caches", 5, 4, [], 3, [[0, 1]], [0]),
        paged_append("no-blocks", 0, 4, one, 3, [[0, 1]], [0]),
        paged_append("blocks-of-0", 3, 0, one, 3, [[0, 1]], [0]),
        paged_append("one-block", 1, 16, one, 3, [[0], [0]], [3, 0], None, HALF, "padded",
                     "odd-sequence"),
        paged_append("65-caches", 5, 4, uneven, 3, [[4, 0]], [2], [3]),
    ]  # fmt: skip


# paged_compact_


def paged_compact(name, blocks, size, heads, tables, base, path, dtype=torch.float32,
                  layout="contiguous", ids=torch.int64, step=1):  # fmt: skip
    """A case of paged_compact_.

    heads: (H, D) of each cache [blocks, size, H, D]; with layout "transposed" memory is in the
    order [blocks, H, size, D].
    """

    def build(g):
        caches = [embedded((blocks, size, h, d), dtype, layout, g) for h, d in heads]
        (bases,) = vectors([base], len(tables), step)
        return caches, block_tables(tables, 2, step), bases, path_tensor(path, ids, step)

    return Case("paged_compact_", name, build)


def distinct_blocks(r, b, m, blocks):
    """Block tables [b, m] of different blocks in random order."""
    drawn = r.sample(range(blocks), b * m)
    return [drawn[i * m : (i + 1) * m] for i in range(b)]


@functools.cache
def paged_compact_cases():
    base, path = map(list, zip(*PATHS, strict=True))
    r = seeded("paged")
    tables = distinct_blocks(r, len(base), 3, 60)
    for row, bad in ((4, -1), (1, 60), (11, -7), (16, INT32_MAX)):
        tables[row][r.randrange(3)] = bad

    def edges(name, heads, *args, size=4, **kwargs):
        return paged_compact(name, 60, size, heads, tables, base, path, *args, **kwargs)

    cases = [
        edges(f"{dtype_name(dtype)}-{layout}", [(2, 16), (3, 3)], dtype, layout, torch.int32)
        for dtype, layout in DTYPES_AND_LAYOUTS
    ]
    cases += [edges(odd, [(3, 16)], HALF, odd) for odd in ODD_LAYOUTS]
    one, pair = [(2, 8)], ([0], [[1, 2]])
    uneven = [(1 + i % 3, 4) for i in range(65)]
    return [
        *cases,
        edges("strided", [(2, 8), (2, 1)], HALF, step=3),
        edges("blocks-of-1", one, size=1),
        edges("blocks-of-64", one, size=64),
        paged_compact("B0", 5, 4, one, [], [], []),
        paged_compact("P0", 5, 4, one, [[0, 1]], [2], [[]]),
        paged_compact("M0", 5, 4, one, [[]], *pair),
        paged_compact("no-caches", 5, 4, [], [[0, 1]], *pair),
        paged_compact("no-blocks", 0, 4, one, [[0, 1]], *pair),
        paged_compact("blocks-of-0", 3, 0, one, [[0, 1]], *pair),
        paged_compact("one-block", 1, 16, one, [[0]], [3], [[1, 2, 5]], HALF),
        paged_compact("65-caches", 5, 4, uneven, [[4, 0]], [1], [[0, 2, 5]]),
    ]


# paged_truncate_


def paged_truncate(name, tables, old, new, size, step=1):
    """A case of paged_truncate_."""

    def build(g):
        del g
        return (block_tables(tables, 3, step), *vectors([old, new], len(tables), step), size)

    return Case("paged_truncate_", name, build)


@functools.cache
def paged_truncate_cases():
    pairs = [(old, new) for old in range(-1, 19) for new in range(-1, 20)]
    pairs += [(HUGE, 3), (HUGE, -HUGE - 1), (-HUGE - 1, HUGE), (HUGE, HUGE - 1), (HUGE, HUGE)]
    old, new = map(list, zip(*pairs, strict=True))
    r = seeded("freed")
    tables = [[r.choice((-1, r.randint(0, 99), 7)) for _ in range(5)] for _ in pairs]
    long = [[r.randint(-1, 9) for _ in range(200)] for _ in range(3)]
    many = [[i, i + 1] for i in range(3000)]
    return [
        *(paged_truncate(f"size-{n}", tables, old, new, n) for n in (1, 3, 4, 16, HUGE)),
        paged_truncate("strided", tables, old, new, 4, 3),
        paged_truncate("long", long, [800, 790, 3], [2, 150, 1], 4),
        paged_truncate("B0", [], [], [], 4),
        paged_truncate("M0", [[], []], [4, 9], [1, 0], 4),
        paged_truncate("many-sequences", many, [8] * 3000, [4] * 3000, 4),
    ]


def move_cases():
    """The edge cases of all cache ops but kv_append_ and kv_truncate_."""
    return [
        *(*compact_cases(), every_path(), *paged_append_cases(), *paged_compact_cases()),
        *paged_truncate_cases(),
        *(*realign_cases(), *ring_cases()),
    ]
