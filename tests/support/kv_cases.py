"""Cases of the cache ops, every byte around them included, and the comparison all targets share."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field

import torch

from specdec_kernels import reference

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.int32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
LAYOUTS = ("contiguous", "sliced", "padded", "transposed")
ODD = ("odd-sequence", "odd-head", "odd-slot", "odd-start")
HUGE = 2**63 - 1


# A dtype of each size is enough for Triton, and its interpreter takes many seconds for hundreds of
# caches or sequences.
HEAVY = (
    *("bfloat16-", "int32-", "float8_"),
    *("64-caches", "256-caches", "257-caches", "600-caches", "-many", "-1"),
)


def light(cases):
    return [c for c in cases if not c.id.startswith(HEAVY)]


@dataclass
class Strided:
    """A view and the whole buffer it lies in: what an op must not touch is part of the result."""

    buffer: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def view(self):
        return self.buffer.as_strided(self.size, self.stride, self.offset)

    def copy(self, device="cpu"):
        buffer = self.buffer.to(device, copy=True)
        return Strided(buffer, self.size, self.stride, self.offset)


def strided(size, dtype, layout, g):
    """Random bytes (NaNs of every kind) in a buffer that goes on beyond the view."""
    b, h, s, d = size
    item = dtype.itemsize
    lane = 16 // item
    if layout in ODD:  # all in 16-byte steps, but for one stride or the start
        odd = ODD.index(layout)
        steps = [1, 1, 1, 1]
        for i, below in ((2, d), (1, s), (0, h)):
            steps[i] = -(-below * steps[i + 1] // lane) * lane + (i == odd)
        order, start, count = (0, 1, 2, 3), (0, 0, 0, int(odd == 3)), steps[0] * b
    else:
        wide, order, start = {
            "contiguous": ((b, h, s, d), (0, 1, 2, 3), (0, 0, 0, 0)),
            # odd offsets: the narrowest lanes
            "sliced": ((b + 1, h + 2, s + 3, d + 3), (0, 1, 2, 3), (1, 1, 2, 1)),
            # the widest lanes the rows allow
            "padded": (
                (b + 1, h + 1, s + 1, -(-d // lane) * lane + lane),
                (0, 1, 2, 3),
                (0, 1, 1, 0),
            ),
            # a projection's output [B, S, H, D]
            "transposed": ((b, s, h, d), (0, 2, 1, 3), (0, 0, 0, 0)),
        }[layout]
        steps = [1, 1, 1, 1]
        for i in (2, 1, 0):
            steps[i] = steps[i + 1] * wide[i + 1]
        count = steps[0] * wide[0]
    count += 16
    raw = torch.randint(0, 256, (count * item,), dtype=torch.uint8, generator=g)
    offset = sum(a * b for a, b in zip(start, steps, strict=True))
    return Strided(raw.view(dtype), size, tuple(steps[i] for i in order), offset)


@dataclass
class KvCase:
    """shapes: (H, S, n, D) of each cache. `values` are positions or (lengths, new_lengths)."""

    id: str
    batch: int
    shapes: list[tuple[int, int, int, int]]
    values: list[list[int]]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    entry_layout: str | None = None
    vector_stride: int = 1
    caches: list[Strided] = field(init=False)
    entries: list[Strided] = field(init=False)

    def __str__(self):
        return self.id

    def build(self):
        g = torch.Generator().manual_seed(zlib.crc32(self.id.encode()))
        other = self.entry_layout or self.layout
        b = self.batch
        self.caches = [
            strided((b, h, s, d), self.dtype, self.layout, g) for h, s, _, d in self.shapes
        ]
        self.entries = [strided((b, h, n, d), self.dtype, other, g) for h, _, n, d in self.shapes]
        return self

    def vectors(self, device="cpu"):
        made = []
        for values in self.values:
            assert len(values) == self.batch
            wide = torch.full((self.batch, self.vector_stride), 77, dtype=torch.int64)
            wide[:, 0] = torch.tensor(values, dtype=torch.int64)
            made.append(wide.to(device)[:, 0])
        return made


def same(name, got, want):
    """Bit for bit, NaNs included; names the first element that differs."""
    got, want = (t.cpu().clone(memory_format=torch.contiguous_format) for t in (got, want))
    differ = got.view(torch.uint8) != want.view(torch.uint8)
    if differ.any():
        per_element = differ.view(*want.shape, want.element_size()).any(-1)
        at = per_element.nonzero()[0].tolist()
        raise AssertionError(
            f"{name}{at} is {got[tuple(at)].item()!r}, not {want[tuple(at)].item()!r} "
            f"({int(per_element.sum())} of {want.numel()} differ)"
        )


def _same(case, kind, got, want):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        same(f"{case} {kind}[{i}]", g.buffer, w.buffer)


def check_append(op, case, device="cpu"):
    """`op` and the reference leave the same bytes in every buffer."""
    case.build()
    (positions,) = case.vectors()
    want = [c.copy() for c in case.caches]
    reference.kv_append_([c.view for c in want], [e.view for e in case.entries], positions)
    got = [c.copy(device) for c in case.caches]
    entries = [e.copy(device) for e in case.entries]
    (moved,) = case.vectors(device)
    op([c.view for c in got], [e.view for e in entries], moved)
    _same(case, "caches", got, want)
    _same(case, "entries", entries, case.entries)
    same("positions", moved, positions)


def check_truncate(op, case, zero_fill, device="cpu"):
    case.build()
    lengths, new = case.vectors()
    want = [c.copy() for c in case.caches]
    reference.kv_truncate_([c.view for c in want], lengths, new, zero_fill)
    got = [c.copy(device) for c in case.caches]
    moved, moved_new = case.vectors(device)
    op([c.view for c in got], moved, moved_new, zero_fill)
    _same(case, "caches", got, want)
    same("lengths", moved, lengths)
    same("new_lengths", moved_new, new)


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _edges(s, n):
    """Positions inside, at both ends, half out on each side, wholly out, and huge."""
    return [0, s - n, 1 - n, -n, s - 1, s, -1, HUGE, -HUGE - 1, HUGE - n + 1]


def _rng(name):
    return random.Random(zlib.crc32(name.encode()))


def _mixed(count, name):
    r = _rng(name)
    return [
        (r.randint(1, 4), r.randint(1, 9), r.randint(0, 5), r.choice((1, 2, 3, 8, 16, 65)))
        for _ in range(count)
    ]


def append_cases():
    out = []
    for dtype in DTYPES:
        for layout in LAYOUTS:
            shapes = [(2, 9, 4, 16), (3, 9, 4, 3)]
            out.append(
                KvCase(f"{_name(dtype)}-{layout}", 10, shapes, [_edges(9, 4)], dtype, layout)
            )
    half = torch.float16
    for d in (1, 3, 65, 128):
        out.append(KvCase(f"D{d}", 10, [(2, 7, 3, d)], [_edges(7, 3)], half))
    for odd in ODD:
        for pair in ((odd, "padded"), ("padded", odd)):
            name = f"{pair[0]}-cache-{pair[1]}-entries"
            out.append(KvCase(name, 10, [(3, 7, 3, 16)], [_edges(7, 3)], half, *pair))
    out += [
        KvCase("sliced-cache-transposed-entries", 10, [(3, 7, 3, 24)], [_edges(7, 3)], half,
               "sliced", "transposed"),
        KvCase("padded-cache-contiguous-entries", 10, [(3, 7, 3, 24)], [_edges(7, 3)], half,
               "padded", "contiguous"),
        KvCase("strided-positions", 10, [(2, 7, 3, 8)], [_edges(7, 3)], vector_stride=3),
        KvCase("S1", 10, [(2, 1, 1, 8), (2, 1, 3, 8)], [_edges(1, 1)]),
        KvCase("n-above-S", 10, [(2, 3, 11, 8)], [_edges(3, 11)]),
        KvCase("B0", 0, [(2, 5, 3, 8)], [[]]),
        KvCase("B0-no-caches", 0, [], [[]]),
        KvCase("no-caches", 2, [], [[0, 1]]),
        KvCase("n0", 2, [(2, 5, 0, 8)], [[0, 1]]),
        KvCase("H0-S0-D0", 2, [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 2, 0)], [[0, 1]]),
        KvCase("n0-beside-others", 2, [(2, 5, 0, 8), (2, 5, 2, 8), (0, 5, 2, 8)], [[0, 4]]),
        KvCase("batch-of-one", 1, [(1, 9, 4, 128)], [[3]], torch.bfloat16, "transposed"),
    ]  # fmt: skip
    for count in (64, 65, 256, 257, 600):  # around the tables of csrc/cuda/kv.cuh
        out.append(KvCase(f"{count}-caches", 3, _mixed(count, "append"), [[-1, 2, 5]], half))
    return out


def _lengths(s):
    """Pairs of old and new: shorter, equal, longer, empty, negative, beyond S, huge."""
    pairs = [
        *((s, s - 2), (s, s), (s - 1, s + 3), (3, 0), (0, 0), (2, -5), (-3, 1), (-3, -9)),
        *((s + 4, s - 1), (s + 4, s + 1), (HUGE, 1), (-HUGE - 1, HUGE), (HUGE, -HUGE - 1)),
        (HUGE, HUGE - 1),
    ]
    return [list(v) for v in zip(*pairs, strict=True)]


def truncate_cases():
    out = []
    n = len(_lengths(9)[0])
    for dtype in DTYPES:
        for layout in LAYOUTS:
            shapes = [(2, 9, 0, 16), (3, 9, 0, 3)]
            out.append(KvCase(f"{_name(dtype)}-{layout}", n, shapes, _lengths(9), dtype, layout))
    half = torch.float16
    for d in (1, 3, 65, 128):
        out.append(KvCase(f"D{d}", n, [(2, 7, 0, d)], _lengths(7), half))
    for odd in ODD:
        out.append(KvCase(odd, n, [(3, 7, 0, 16)], _lengths(7), half, odd))
    out += [
        KvCase("strided-lengths", n, [(2, 7, 0, 8)], _lengths(7), vector_stride=3),
        KvCase("S1", n, [(2, 1, 0, 8)], _lengths(1)),
        KvCase("B0", 0, [(2, 5, 0, 8)], [[], []]),
        KvCase("no-caches", 2, [], [[4, 1], [2, 3]]),
        KvCase("H0-S0-D0", 2, [(0, 5, 0, 8), (2, 0, 0, 8), (2, 5, 0, 0)], [[3, 4], [1, 0]]),
        KvCase("long-drop", 2, [(2, 300, 0, 32)], [[300, 290], [0, 5]], half, "transposed"),
    ]
    for count in (64, 65, 256, 257, 600):
        out.append(
            KvCase(f"{count}-caches", 3, _mixed(count, "cut"), [[4, 9, 7], [1, 9, -2]], half)
        )
    return out


def random_case(seed):
    """An append case and a truncate case drawn at random."""
    r = random.Random(seed)
    b = r.randint(1, 4)
    d = r.choice((1, 2, 4, 7, 8, 16, 24, 64))
    shapes = [
        (r.randint(1, 3), r.randint(1, 12), r.randint(0, 6), r.choice((d, r.randint(1, 33))))
        for _ in range(r.randint(1, 5))
    ]
    common = {
        "dtype": r.choice(DTYPES),
        "layout": r.choice(LAYOUTS + ODD),
        "entry_layout": r.choice(LAYOUTS + ODD),
        "vector_stride": r.randint(1, 2),
    }

    def draw(low, high):
        return [r.randint(low, high) for _ in range(b)]

    append = KvCase(f"append-{seed}", b, shapes, [draw(-7, 13)], **common)
    return append, KvCase(f"truncate-{seed}", b, shapes, [draw(-2, 14), draw(-2, 14)], **common)


def far_apart(device="cpu"):
    """A cache [2, 2, 3, 8] of int8 whose sequences lie more than 2^31 elements apart, unwritten
    but for its own rows: only pages that are touched take memory."""
    step = 2**31 + 2**20
    buffer = torch.empty(step + 2**12, dtype=torch.int8, device=device)
    view = buffer.as_strided((2, 2, 3, 8), (step, 64, 16, 1), 32)
    view.fill_(5)
    return view


def check_far_apart(append, truncate, device="cpu"):
    view = far_apart(device)
    want = torch.full(view.shape, 5, dtype=torch.int8)
    new = torch.arange(32, dtype=torch.int8).view(2, 2, 1, 8)
    for positions in ([1, 2], [2, 0]):
        where = torch.tensor(positions)
        reference.kv_append_([want], [new], where)
        append([view], [new.to(device)], where.to(device))
    same("cache", view, want)
    old, cut = torch.tensor([3, 3]), torch.tensor([2, 1])
    truncate([view], old.clone().to(device), cut.to(device), True)
    reference.kv_truncate_([want], old, cut, True)
    same("cache", view, want)
