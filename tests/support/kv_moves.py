"""Cases of the ops that move tokens within caches or drop them, every byte around them included.

An argument is a `Strided` (the whole buffer belongs to the result), a list of them, or a number.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from support.kv_cases import DTYPES, HUGE, LAYOUTS, ODD, Strided, same, strided

from specdec_kernels import reference

HALF = torch.float16
WIDE = 2**31 - 1


@dataclass(frozen=True)
class MoveCase:
    op: str
    id: str
    make: Callable[[torch.Generator], tuple]

    def args(self):
        return self.make(torch.Generator().manual_seed(zlib.crc32(self.id.encode())))

    def __str__(self):
        return f"{self.op}{self.id}"


def _each(f, value):
    if isinstance(value, list):
        return [_each(f, v) for v in value]
    return f(value) if isinstance(value, Strided) else value


def _flat(args):
    return [x for a in args for x in (a if isinstance(a, list) else [a]) if isinstance(x, Strided)]


def check(op, case, device="cpu"):
    """`op` and the reference leave the same bytes in every buffer and return the same."""
    want = case.args()
    got = [_each(lambda x: x.copy(device), a) for a in case.args()]
    specified = getattr(reference, case.op)(*(_each(lambda x: x.view, a) for a in want))
    found = op(*(_each(lambda x: x.view, a) for a in got))
    for i, (g, w) in enumerate(zip(_flat(got), _flat(want), strict=True)):
        same(f"{case} buffers[{i}]", g.buffer, w.buffer)
    outputs = [x if isinstance(x, tuple | list) else [x] for x in (found, specified)]
    for i, (g, w) in enumerate(zip(*outputs, strict=True)):
        if w is not None:
            same(f"{case} outputs[{i}]", g, w)


def numbers(values, shape, dtype=torch.int64, step=1):
    """A tensor of integers as a view whose elements lie `step` apart, and rows farther."""
    row = shape[-1] * step + (3 if step > 1 else 0)
    stride = (row, step) if len(shape) == 2 else (step,)
    buffer = torch.full((shape[0] * (row if len(shape) == 2 else step) + 4,), 77, dtype=dtype)
    out = Strided(buffer, tuple(shape), stride, 2)
    out.view.copy_(torch.tensor(values, dtype=torch.int64).to(dtype).reshape(shape))
    return out


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _rng(text):
    return random.Random(zlib.crc32(text.encode()))


def _caches(b, shapes, dtype, layout, g):
    return [strided((b, h, s, d), dtype, layout, g) for h, s, d in shapes]


# Compaction.

# (base, path) for S = 9: in place, broken, out of range, huge.
PATHS = [
    *((0, [0, 1, 2, 3, 4]), (2, [0, 2, 5, -1, -1]), (2, [0, 2, 6, 7, -1]), (1, [1, 2, 3, 4, 5])),
    *((3, [0, 3, 3, 4, -1]), (3, [0, 4, 2, 5, -1]), (3, [-1, 2, 3, 4, 5]), (-1, [0, 2, 3, 4, 5])),
    *((9, [0, 1, 2, 3, 4]), (8, [0, 1, 2, 3, 4]), (HUGE, [0, 2, 3, 4, 5]), (0, [4, 5, 6, 7, 8])),
    *((-HUGE - 1, [0, 1, 2, 3, 4]), (4, [0, WIDE, WIDE, 4, 5]), (2, [0, -1, 3, 4, 5])),
    *((5, [2, 3, -1, -1, -1]), (0, [0, 1, 3, 4, 8]), (7, [1, -9, 2, 3, 4]), (1, [0, 2, 4, 6, 7])),
]


def _compact(name, b, shapes, base, path, dtype=torch.float32, layout="contiguous", ids=None,
             step=1):  # fmt: skip
    ids = ids or torch.int64
    length = len(path[0]) if path else 0

    def make(g):
        bases = numbers(base, (b,), step=step)
        return _caches(b, shapes, dtype, layout, g), bases, numbers(path, (b, length), ids, step)

    return MoveCase("kv_compact_", name, make)


def compact_cases():
    base, path = map(list, zip(*PATHS, strict=True))
    n = len(base)

    def edges(name, shapes, *args, **kwargs):
        return _compact(name, n, shapes, base, path, *args, **kwargs)

    out = [
        edges(f"{_name(dtype)}-{layout}", [(2, 9, 16), (3, 9, 3)], dtype, layout, torch.int32)
        for dtype in DTYPES
        for layout in LAYOUTS
    ]
    out += [edges(f"D{d}", [(2, 9, d), (1, 7, d), (2, 12, d)], HALF) for d in (1, 3, 65, 128)]
    out += [edges(odd, [(3, 9, 16)], HALF, odd) for odd in ODD]
    out += [
        edges("strided-ids", [(2, 9, 8)], step=3),
        edges("strided-int32", [(2, 9, 8)], HALF, "transposed", torch.int32, 2),
        edges("scales", [(2, 9, 16), (2, 9, 1), (1, 9, 1)], torch.int8),
        _compact("B0", 0, [(2, 5, 8)], [], []),
        _compact("P0", 2, [(2, 5, 8)], [0, 1], [[], []]),
        _compact("no-caches", 2, [], [0, 1], [[0, 2], [1, 2]]),
        _compact("H0-S0-D0", 1, [(0, 5, 2), (2, 0, 2), (2, 5, 0)], [0], [[1, 2]]),
        _compact("beside-empty", 1, [(0, 5, 2), (2, 5, 2)], [0], [[1, 2]]),
        _compact("batch-of-one", 1, [(1, 9, 128)], [3], [[1, 2, 5]], HALF, "transposed"),
    ]
    for count in (64, 65, 256, 257, 600):  # around the tables of csrc/cuda/kv.cuh
        r = _rng("compact")
        shapes = [(r.randint(1, 3), r.randint(1, 9), r.choice((1, 3, 8, 16))) for _ in range(count)]
        out.append(_compact(f"{count}-caches", 2, shapes, [1, 3], [[0, 2, 3], [1, 2, 5]], HALF))
    return out


def every_path(slots=4, length=3):
    """All bases and paths around a cache of a few slots."""
    base, path = [], []
    for first in range(-1, slots + 1):
        for nodes in itertools.product(range(-1, slots + 1), repeat=length):
            base.append(first)
            path.append(list(nodes))
    return _compact("-every", len(base), [(1, slots, 3)], base, path, torch.int8)


def increasing(r, length, nodes):
    """A random path: node ids in increasing order, then -1."""
    n = r.randint(0, min(length, nodes))
    return [*sorted(r.sample(range(nodes), n)), *[-1] * (length - n)]


def random_compact(seed):
    r = random.Random(seed)
    b, length = r.randint(1, 5), r.randint(0, 12)
    shapes = [
        (r.randint(1, 3), r.randint(1, 30), r.choice((1, 2, 7, 8, 24, 64)))
        for _ in range(r.randint(1, 4))
    ]
    base = [r.randint(-1, 16) for _ in range(b)]
    path = [increasing(r, length, r.randint(1, 24)) for _ in range(b)]
    for row in path:
        if row and r.random() < 0.3:
            row[r.randrange(length)] = r.randint(-2, 24)
    ids = r.choice((torch.int32, torch.int64))
    layout = r.choice(LAYOUTS + ODD)
    return _compact(f"-{seed}", b, shapes, base, path, r.choice(DTYPES), layout, ids,
                    r.randint(1, 2))  # fmt: skip


# Paged compaction.


def _paged(name, blocks, size, heads, tables, base, path, dtype=torch.float32,
           layout="contiguous", ids=torch.int64, step=1):  # fmt: skip
    """heads: (H, D) of each cache [blocks, size, H, D]; layout "transposed" is HND."""
    b, m = len(tables), len(tables[0]) if tables else 2

    def make(g):
        caches = [strided((blocks, size, h, d), dtype, layout, g) for h, d in heads]
        table = numbers(tables, (b, m), torch.int32, step)
        length = len(path[0]) if path else 0
        return caches, table, numbers(base, (b,), step=step), numbers(path, (b, length), ids, step)

    return MoveCase("paged_compact_", name, make)


def _tables(r, b, m, blocks):
    """Distinct blocks, in any order."""
    drawn = r.sample(range(blocks), b * m)
    return [drawn[i * m : (i + 1) * m] for i in range(b)]


def paged_cases():
    base, path = map(list, zip(*PATHS, strict=True))
    n, size = len(base), 4
    r = _rng("paged")
    tables = _tables(r, n, 3, 60)
    for row, bad in ((4, -1), (1, 60), (11, -7), (16, WIDE)):
        tables[row][r.randrange(3)] = bad
    common = (60, size)
    out = []
    for dtype in DTYPES:
        for layout in LAYOUTS:
            out.append(
                _paged(f"{_name(dtype)}-{layout}", *common, [(2, 16), (3, 3)], tables, base, path,
                       dtype, layout, torch.int32)
            )  # fmt: skip
    out += [_paged(odd, *common, [(3, 16)], tables, base, path, HALF, odd) for odd in ODD]
    out += [
        _paged("strided", *common, [(2, 8), (2, 1)], tables, base, path, HALF, step=3),
        _paged("blocks-of-1", 60, 1, [(2, 8)], tables, base, path),
        _paged("blocks-of-64", 60, 64, [(2, 8)], tables, base, path),
        _paged("B0", 5, 4, [(2, 8)], [], [], []),
        _paged("P0", 5, 4, [(2, 8)], [[0, 1]], [2], [[]]),
        _paged("M0", 5, 4, [(2, 8)], [[]], [0], [[1, 2]]),
        _paged("no-caches", 5, 4, [], [[0, 1]], [0], [[1, 2]]),
        _paged("no-blocks", 0, 4, [(2, 8)], [[0, 1]], [0], [[1, 2]]),
        _paged("blocks-of-0", 3, 0, [(2, 8)], [[0, 1]], [0], [[1, 2]]),
        _paged("one-block", 1, 16, [(2, 8)], [[0]], [3], [[1, 2, 5]], HALF),
        _paged("65-caches", 5, 4, [(1 + i % 3, 4) for i in range(65)], [[4, 0]], [1], [[0, 2, 5]]),
    ]
    return out


def random_paged(seed):
    r = random.Random(seed)
    b, m, size, length = r.randint(1, 4), r.randint(1, 6), r.randint(1, 7), r.randint(0, 9)
    blocks = b * m + r.randint(0, 4)
    tables = _tables(r, b, m, blocks)
    if r.random() < 0.3:
        tables[r.randrange(b)][r.randrange(m)] = r.choice((-1, blocks, -5))
    heads = [(r.randint(1, 3), r.choice((1, 4, 7, 8, 32))) for _ in range(r.randint(1, 3))]
    base = [r.randint(-1, m * size) for _ in range(b)]
    path = [increasing(r, length, r.randint(1, 20)) for _ in range(b)]
    ids = r.choice((torch.int32, torch.int64))
    return _paged(f"-{seed}", blocks, size, heads, tables, base, path, r.choice(DTYPES),
                  r.choice(LAYOUTS + ODD), ids, r.randint(1, 2))  # fmt: skip


def paged_truncate_cases():
    def case(name, tables, old, new, size, step=1):
        def make(g):
            b, m = len(tables), len(tables[0]) if tables else 3
            table = numbers(tables, (b, m), torch.int32, step)
            return table, numbers(old, (b,), step=step), numbers(new, (b,), step=step), size

        return MoveCase("paged_truncate_", name, make)

    pairs = [(old, new) for old in range(-1, 19) for new in range(-1, 20)]
    pairs += [(HUGE, 3), (HUGE, -HUGE - 1), (-HUGE - 1, HUGE), (HUGE, HUGE - 1), (HUGE, HUGE)]
    old, new = map(list, zip(*pairs, strict=True))
    r = _rng("freed")
    tables = [[r.choice((-1, r.randint(0, 99), 7)) for _ in range(5)] for _ in pairs]
    long = [[r.randint(-1, 9) for _ in range(200)] for _ in range(3)]
    return [
        *(case(f"-{size}", tables, old, new, size) for size in (1, 3, 4, 16, HUGE)),
        case("-strided", tables, old, new, 4, 3),
        case("-long", long, [800, 790, 3], [2, 150, 1], 4),
        case("-B0", [], [], [], 4),
        case("-M0", [[], []], [4, 9], [1, 0], 4),
        case("-many", [[i, i + 1] for i in range(3000)], [8] * 3000, [4] * 3000, 4),
    ]


# Realignment.


def _realign(name, shapes, moves, dtype=torch.float32, layout="contiguous", fill=True, step=1):
    def make(g):
        columns = list(zip(*moves, strict=True)) or [(), (), ()]
        b = len(moves)
        vectors = (numbers(list(c), (b,), step=step) for c in columns)
        return (_caches(b, shapes, dtype, layout, g), *vectors, fill)

    return MoveCase("kv_realign_", f"{name}-{'fill' if fill else 'keep'}", make)


def realign_cases():
    some = [(0, 9, 2), (2, 5, -2), (1, 6, 1), (3, 6, -1), (0, 4, 4), (4, 4, -4), (2, 3, 0),
            (-2, 6, 3), (5, 9, -3), (0, 9, 9), (0, 9, -9), (7, 2, -7), (2, -1, 3), (0, 2, 7),
            (0, HUGE, 1), (-HUGE - 1, HUGE, 3), (4, 3, HUGE), (4, 3, -HUGE - 1),
            (HUGE, HUGE, HUGE), (-100, 50, 1), (-3, HUGE, -2), (2, 4, -1)]  # fmt: skip
    out = []
    for fill in (False, True):
        for dtype in DTYPES:
            for layout in LAYOUTS:
                shapes = [(2, 9, 16), (3, 9, 3)]
                out.append(_realign(f"{_name(dtype)}-{layout}", shapes, some, dtype, layout, fill))
        out += [_realign(odd, [(3, 9, 16)], some, HALF, odd, fill) for odd in ODD]
        out += [_realign("strided", [(2, 9, 1), (1, 5, 8)], some, fill=fill, step=3)]
    every = itertools.product(range(-2, 6), range(-1, 8), range(-5, 6))
    out += [
        _realign("every", [(1, 4, 3)], list(every), torch.int8),
        _realign("B0", [(2, 5, 3)], []),
        _realign("no-caches", [], some),
        _realign("H0-S0-D0", [(0, 5, 2), (2, 0, 2), (2, 5, 0)], [(0, 3, 1)]),
        _realign("long", [(2, 300, 32)], [(0, 280, 1), (20, 280, -17), (0, 150, 150)], HALF),
        _realign("65-caches", [(1, 5 + i % 4, 4) for i in range(65)], [(0, 4, 2), (2, 4, -2)]),
        _realign("257-caches", [(1, 5 + i % 4, 4) for i in range(257)], [(0, 4, 2), (2, 4, -2)]),
    ]
    return out


# Rings.


def _ring(name, shapes, pairs, window, dtype=torch.float32, layout="contiguous", fill=True, step=1):
    def make(g):
        b = len(pairs)
        old, new = ([p[i] for p in pairs] for i in (0, 1))
        vectors = (numbers(v, (b,), step=step) for v in (old, new))
        return (_caches(b, shapes, dtype, layout, g), *vectors, window, fill)

    return MoveCase("ring_truncate_", f"{name}-W{window}-{'fill' if fill else 'keep'}", make)


def ring_cases():
    some = [(9, 7), (9, 9), (20, 18), (20, 11), (20, 2), (13, 0), (4, 1), (9, 12), (-3, 2), (5, -5),
            (0, 0), (HUGE, HUGE - 2), (HUGE, 3), (HUGE, -HUGE - 1), (-HUGE - 1, HUGE)]  # fmt: skip
    every = [(old, new) for old in range(12) for new in range(-1, 13)]
    out = [
        _ring(f"{_name(dtype)}-{layout}", [(2, 9, 16), (3, 7, 3)], some, 4, dtype, layout)
        for dtype in DTYPES
        for layout in LAYOUTS
    ]
    out += [_ring(odd, [(3, 9, 16)], some, 9, HALF, odd) for odd in ODD]
    out += [_ring("every", [(1, 3, 2)], every, w, torch.int8) for w in (1, 2, 3)]
    return [
        *out,
        _ring("keep", [(2, 9, 16)], some, 4, fill=False),
        _ring("strided", [(2, 9, 1)], some, 4, step=3),
        _ring("B0", [(2, 5, 3)], [], 2),
        _ring("no-caches", [], some, 4),
        _ring("H0-D0", [(0, 5, 2), (2, 6, 0)], some, 5),
        _ring("257-caches", [(1, 5 + i % 4, 4) for i in range(257)], [(9, 7), (20, 16)], 3),
    ]


def every_case():
    """Of all five ops."""
    return [
        *(*compact_cases(), every_path(), *paged_cases(), *paged_truncate_cases()),
        *(*realign_cases(), *ring_cases()),
    ]
