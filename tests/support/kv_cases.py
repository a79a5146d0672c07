"""Edge cases of the cache ops: `proofs.Case`s with buffers around their tensors.

The cases of `proofs` are small and serve every test of every op; these add all
dtypes and layouts, indices at and beyond the ends, and many caches. This file has the ops that take
lengths or positions, kv_path_cases.py those that take a path or a block table.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib

import proofs
import pytest
import torch
from fuzz.calls import MAKERS
from fuzz.checks import comparable
from fuzz.values import Source
from proofs import Case
from proofs.kv import realign_case
from support import simt_kv
from support.kv_buffers import (
    DTYPES_AND_LAYOUTS,
    HUGE,
    ODD_LAYOUTS,
    embedded,
    integers,
)

from specdec_kernels.arguments.checks import dtype_name

HALF = torch.float16
PROVIDERS = [
    "cpp",
    *(["cuda"] if simt_kv.available else []),
    *(["triton"] if "triton" in proofs.providers("kv_append_") else []),
]
# Around the limits of the tables of caches in csrc/cuda/kv.
MANY_CACHES = (64, 65, 256, 257, 600)
# The interpreter of Triton takes many seconds for hundreds of caches or sequences, and a dtype of
# each size is enough for it.
SLOW_IN_INTERPRETER = (
    *("bfloat16-", "int32-", "float8_", "many-sequences", "size-1"),
    *("64-caches", "256-caches", "257-caches", "600-caches"),
)


# `make test` leaves these to `make test-all`.
FULL = {
    "triton": (
        *("every", "size-", "65-caches", "D1", "D3", "D65", "scales"),
        *("float", "int8-", "odd-", "padded-", "sliced-", "blocks-of-"),
    ),
    "cuda": ("256-caches", "600-caches"),
}


def each(cases, of="{provider}-{case}"):
    """(provider, case) parameters, named by `of`.

    Triton's interpreter gets those that it finishes in seconds.
    """
    return [
        pytest.param(
            n,
            c,
            id=of.format(provider=n, op=c.op, case=c),
            marks=[pytest.mark.full] if c.id.startswith(FULL.get(n, ())) else [],
        )
        for n in PROVIDERS
        for c in cases
        if n != "triton" or not c.id.startswith(SLOW_IN_INTERPRETER)
    ]


def seeded(name):
    return random.Random(zlib.crc32(name.encode()))


def caches_of(b, shapes, dtype, layout, g):
    """One cache [b, H, S, D] for each (H, S, D)."""
    return [embedded((b, h, s, d), dtype, layout, g) for h, s, d in shapes]


def vectors(columns, b, step):
    return [integers(values, (b,), step=step) for values in columns]


# kv_append_


def append(name, shapes, positions, dtype=torch.float32, layout="contiguous", entry_layout=None,
           step=1):  # fmt: skip
    """A case of kv_append_. shapes: (H, S, n, D) of each cache and its n new entries."""

    def build(g):
        b = len(positions)
        caches = caches_of(b, [(h, s, d) for h, s, _, d in shapes], dtype, layout, g)
        new = [(h, n, d) for h, _, n, d in shapes]
        entries = caches_of(b, new, dtype, entry_layout or layout, g)
        return (caches, entries, *vectors([positions], b, step))

    return Case("kv_append_", name, build)


def _edges(s, n):
    """Positions inside, at both ends, half out on each side, wholly out, and huge."""
    return [0, s - n, 1 - n, -n, s - 1, s, -1, HUGE, -HUGE - 1, HUGE - n + 1]


@functools.cache
def append_cases():
    cases = [
        append(f"{dtype_name(dtype)}-{layout}", [(2, 9, 4, 16), (3, 9, 4, 3)], _edges(9, 4), dtype,
               layout)
        for dtype, layout in DTYPES_AND_LAYOUTS
    ]  # fmt: skip
    cases += [append(f"D{d}", [(2, 7, 3, d)], _edges(7, 3), HALF) for d in (1, 3, 65, 128)]
    for odd in ODD_LAYOUTS:
        for pair in ((odd, "padded"), ("padded", odd)):
            name = f"{pair[0]}-cache-{pair[1]}-entries"
            cases.append(append(name, [(3, 7, 3, 16)], _edges(7, 3), HALF, *pair))
    wide = [(3, 7, 3, 24)], _edges(7, 3), HALF
    cases += [
        append("sliced-cache-transposed-entries", *wide, "sliced", "transposed"),
        append("padded-cache-contiguous-entries", *wide, "padded", "contiguous"),
        append("strided-positions", [(2, 7, 3, 8)], _edges(7, 3), step=3),
        append("S1", [(2, 1, 1, 8), (2, 1, 3, 8)], _edges(1, 1)),
        append("n-above-S", [(2, 3, 11, 8)], _edges(3, 11)),
        append("B0", [(2, 5, 3, 8)], []),
        append("B0-no-caches", [], []),
        append("no-caches", [], [0, 1]),
        append("n0", [(2, 5, 0, 8)], [0, 1]),
        append("H0-S0-D0", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 2, 0)], [0, 1]),
        append("n0-beside-others", [(2, 5, 0, 8), (2, 5, 2, 8), (0, 5, 2, 8)], [0, 4]),
        append("batch-of-one", [(1, 9, 4, 128)], [3], torch.bfloat16, "transposed"),
    ]
    for count in MANY_CACHES:
        r = seeded("append")
        shapes = [
            (r.randint(1, 4), r.randint(1, 9), r.randint(0, 5), r.choice((1, 2, 3, 8, 16, 65)))
            for _ in range(count)
        ]
        cases.append(append(f"{count}-caches", shapes, [-1, 2, 5], HALF))
    return cases


# kv_truncate_


def truncate(name, shapes, lengths, new_lengths, dtype=torch.float32, layout="contiguous", *,
             fill=True, step=1):  # fmt: skip
    """A case of kv_truncate_. shapes: (H, S, D) of each cache."""

    def build(g):
        b = len(lengths)
        caches = caches_of(b, shapes, dtype, layout, g)
        return (caches, *vectors([lengths, new_lengths], b, step), fill)

    return Case("kv_truncate_", f"{name}-{'fill' if fill else 'keep'}", build)


def _old_and_new(s):
    """(lengths, new_lengths): shorter, equal, longer, empty, negative, beyond S, huge."""
    pairs = [
        *((s, s - 2), (s, s), (s - 1, s + 3), (3, 0), (0, 0), (2, -5), (-3, 1), (-3, -9)),
        *((s + 4, s - 1), (s + 4, s + 1), (HUGE, 1), (-HUGE - 1, HUGE), (HUGE, -HUGE - 1)),
        (HUGE, HUGE - 1),
    ]
    return tuple(map(list, zip(*pairs, strict=True)))


@functools.cache
def truncate_cases():
    cases = []
    for fill in (True, False):
        case = functools.partial(truncate, fill=fill)
        cases += [
            case(f"{dtype_name(dtype)}-{layout}", [(2, 9, 16), (3, 9, 3)], *_old_and_new(9), dtype,
                 layout)
            for dtype, layout in DTYPES_AND_LAYOUTS
        ]  # fmt: skip
        cases += [case(f"D{d}", [(2, 7, d)], *_old_and_new(7), HALF) for d in (1, 3, 65, 128)]
        cases += [case(odd, [(3, 7, 16)], *_old_and_new(7), HALF, odd) for odd in ODD_LAYOUTS]
        cases += [
            case("strided-lengths", [(2, 7, 8)], *_old_and_new(7), step=3),
            case("S1", [(2, 1, 8)], *_old_and_new(1)),
            case("B0", [(2, 5, 8)], [], []),
            case("no-caches", [], [4, 1], [2, 3]),
            case("H0-S0-D0", [(0, 5, 8), (2, 0, 8), (2, 5, 0)], [3, 4], [1, 0]),
            case("long-drop", [(2, 300, 32)], [300, 290], [0, 5], HALF, "transposed"),
        ]
        for count in MANY_CACHES:
            r = seeded("cut")
            shapes = [
                (r.randint(1, 4), r.randint(1, 9), r.choice((1, 2, 3, 8, 16, 65)))
                for _ in range(count)
            ]
            cases.append(case(f"{count}-caches", shapes, [4, 9, 7], [1, 9, -2], HALF))
    return cases


@functools.cache
def large_cases():
    """One case of kv_append_ and one of kv_truncate_ with many rows."""
    bf16 = torch.bfloat16
    old, new = [900, 700, 3], [1, 699, 3]
    return [
        append("many-rows", [(8, 900, 600, 128)], [-7, 400, 890], bf16),
        truncate("many-rows", [(8, 900, 128)], old, new, bf16, "transposed"),
    ]


# Random calls.


def random_case(op, seed):
    """A random call of the fuzzer, one whose arguments share no memory."""

    def build(_):
        calls = (MAKERS[op](Source(seed, i)) for i in itertools.count())
        arguments = (tuple(call.arguments.values()) for call in calls)
        return next(filter(comparable, arguments))

    return Case(op, f"random-{seed}", build)


# Realigning.


def realign(name, shapes, moves, dtype=torch.float32, layout="contiguous", *, fill=True, step=1):
    """A shift of each sequence; moves: (start, length, shift)."""

    def build(g):
        columns = list(zip(*moves, strict=True)) or [(), (), ()]
        b = len(moves)
        return (caches_of(b, shapes, dtype, layout, g), *vectors(columns, b, step), fill)

    return Case(realign_case(0, 1, fill=fill).op, f"{name}-{'fill' if fill else 'keep'}", build)


@functools.cache
def realign_cases():
    some = [(0, 9, 2), (2, 5, -2), (1, 6, 1), (3, 6, -1), (0, 4, 4), (4, 4, -4), (2, 3, 0),
            (-2, 6, 3), (5, 9, -3), (0, 9, 9), (0, 9, -9), (7, 2, -7), (2, -1, 3), (0, 2, 7),
            (0, HUGE, 1), (-HUGE - 1, HUGE, 3), (4, 3, HUGE), (4, 3, -HUGE - 1),
            (HUGE, HUGE, HUGE), (-100, 50, 1), (-3, HUGE, -2), (2, 4, -1)]  # fmt: skip
    cases = []
    for fill in (False, True):
        case = functools.partial(realign, fill=fill)
        cases += [
            case(f"{dtype_name(dtype)}-{layout}", [(2, 9, 16), (3, 9, 3)], some, dtype, layout)
            for dtype, layout in DTYPES_AND_LAYOUTS
        ]
        cases += [case(odd, [(3, 9, 16)], some, HALF, odd) for odd in ODD_LAYOUTS]
        cases += [case("strided", [(2, 9, 1), (1, 5, 8)], some, step=3)]
    every = itertools.product(range(-2, 6), range(-1, 8), range(-5, 6))
    uneven = [(1, 5 + i % 4, 4) for i in range(257)]
    return [
        *cases,
        realign("every", [(1, 4, 3)], list(every), torch.int8),
        realign("B0", [(2, 5, 3)], []),
        realign("no-caches", [], some),
        realign("H0-S0-D0", [(0, 5, 2), (2, 0, 2), (2, 5, 0)], [(0, 3, 1)]),
        realign("long", [(2, 300, 32)], [(0, 280, 1), (20, 280, -17), (0, 150, 150)], HALF),
        realign("65-caches", uneven[:65], [(0, 4, 2), (2, 4, -2)]),
        realign("257-caches", uneven, [(0, 4, 2), (2, 4, -2)]),
    ]


# ring_truncate_


def ring(name, shapes, pairs, window, dtype=torch.float32, layout="contiguous", *, fill=True,
         step=1):  # fmt: skip
    """A case of ring_truncate_. pairs: (length, new length) of each sequence."""

    def build(g):
        b = len(pairs)
        columns = [[p[i] for p in pairs] for i in (0, 1)]
        return (caches_of(b, shapes, dtype, layout, g), *vectors(columns, b, step), window, fill)

    return Case("ring_truncate_", f"{name}-W{window}-{'fill' if fill else 'keep'}", build)


@functools.cache
def ring_cases():
    some = [(9, 7), (9, 9), (20, 18), (20, 11), (20, 2), (13, 0), (4, 1), (9, 12), (-3, 2), (5, -5),
            (0, 0), (HUGE, HUGE - 2), (HUGE, 3), (HUGE, -HUGE - 1), (-HUGE - 1, HUGE)]  # fmt: skip
    every = [(old, new) for old in range(12) for new in range(-1, 13)]
    cases = [
        ring(f"{dtype_name(dtype)}-{layout}", [(2, 9, 16), (3, 7, 3)], some, 4, dtype, layout)
        for dtype, layout in DTYPES_AND_LAYOUTS
    ]
    cases += [ring(odd, [(3, 9, 16)], some, 9, HALF, odd) for odd in ODD_LAYOUTS]
    cases += [ring("every", [(1, 3, 2)], every, w, torch.int8) for w in (1, 2, 3)]
    return [
        *cases,
        ring("plain", [(2, 9, 16)], some, 4, fill=False),
        ring("strided", [(2, 9, 1)], some, 4, step=3),
        ring("B0", [(2, 5, 3)], [], 2),
        ring("no-caches", [], some, 4),
        ring("H0-D0", [(0, 5, 2), (2, 6, 0)], some, 5),
        ring("smallest-first", [(2, 7, 3), (2, 9, 16)], [(13, 9), (20, 15), (9, 7)], 4),
        ring("257-caches", [(1, 5 + i % 4, 4) for i in range(257)], [(9, 7), (20, 16)], 3),
    ]
