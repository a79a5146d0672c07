"""Cases of the cache ops. Values are whole numbers, which every dtype holds exactly."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from proofs.case import Args, Case, sliced, spaced
from specdec_kernels.arguments.checks import dtype_name

bf16, f16 = torch.bfloat16, torch.float16


def _caches(
    layers: int, b: int, s: int, dtype: torch.dtype, layout: str, g: Generator
) -> list[Tensor]:
    heads = [2 + i % 2 for i in range(layers)]
    made = [torch.randint(-100, 100, (b, h, s + h, 12), generator=g).to(dtype) for h in heads]
    return [sliced(c) for c in made] if layout == "sliced" else made


def append_case(
    b: int, s: int, n: int, dtype: torch.dtype = torch.float32, layout: str = "dense"
) -> Case:
    """A case of `kv_append_` with four caches and some positions outside [0, S)."""

    def build(g: Generator) -> Args:
        caches = _caches(4, b, s, dtype, layout, g)
        entries = [
            torch.randint(-100, 100, (b, c.shape[1], n, 12), generator=g).to(dtype) for c in caches
        ]
        entries = [sliced(e) for e in entries] if layout == "sliced" else entries
        return caches, entries, torch.randint(-n, s + 1, (b,), generator=g)

    name = f"B{b}-S{s}-n{n}-{dtype_name(dtype)}-{layout}"
    return Case("kv_append_", name, build)


def truncate_case(
    b: int, s: int, dtype: torch.dtype = torch.float32, *, fill: bool, layout: str = "dense"
) -> Case:
    """A case of `kv_truncate_` with new lengths below, at and above the old ones."""

    def build(g: Generator) -> Args:
        lengths = torch.randint(0, s + 1, (b,), generator=g)
        new = lengths + torch.randint(-4, 2, (b,), generator=g)
        return _caches(3, b, s, dtype, layout, g), lengths, new, fill

    name = f"B{b}-S{s}-{dtype_name(dtype)}-{'fill' if fill else 'keep'}-{layout}"
    return Case("kv_truncate_", name, build)


def _paths(b: int, p: int, nodes: int, g: Generator) -> Tensor:
    """[b, p] int64: increasing node ids below `nodes`, then -1.

    The last sequence ends with an id that is too low to be valid.
    """
    made = torch.full((b, p), -1)
    for i, row in enumerate(made):
        n = int(torch.randint(0, min(p, nodes) + 1, (), generator=g))
        row[:n] = torch.randperm(nodes, generator=g)[:n].sort().values
        if i and i == b - 1 and n > 1:
            row[n - 1] = row[0]
    return made


def compact_case(b, s, p, dtype=torch.float32, *, layout="dense", id_dtype=torch.int64) -> Case:
    """A case of `kv_compact_` with four caches and trees that reach beyond some of them."""

    def build(g: Generator) -> Args:
        base = torch.randint(-1, s + 1, (b,), generator=g)
        path = _paths(b, p, s, g).to(id_dtype)
        if layout == "sliced":
            base, path = spaced(base), sliced(path)
        return _caches(4, b, s, dtype, layout, g), base, path

    name = f"B{b}-S{s}-P{p}-{dtype_name(dtype)}-{dtype_name(id_dtype)}-{layout}"
    return Case("kv_compact_", name, build)


def _blocks(b: int, m: int, g: Generator) -> Tensor:
    """[b, m] int32 block tables: random distinct blocks, the last of every other sequence is -1."""
    tables = torch.randperm(b * m, generator=g).to(torch.int32).view(b, m)
    tables[1::2, m - 1 :] = -1
    return tables


def _pools(
    blocks: int, size: int, heads: tuple[int, ...], dtype: torch.dtype, layout: str, g: Generator
) -> list[Tensor]:
    """A paged cache for each number of heads; in layout HND, heads come before slots in memory."""
    caches = []
    for h in heads:
        shape = (blocks, h, size, 12) if layout == "HND" else (blocks, size, h, 12)
        cache = torch.randint(-100, 100, shape, generator=g).to(dtype)
        cache = sliced(cache) if layout == "sliced" else cache
        caches.append(cache.transpose(1, 2) if layout == "HND" else cache)
    return caches


def paged_append_case(
    b, m, size, n, dtype=torch.float32, *, layout="NHD", ragged=True, table_dtype=torch.int32
) -> Case:
    """A case of `paged_append_` with three caches; some sequences reach beyond their tables."""

    def build(g: Generator) -> Args:
        caches = _pools(b * m, size, (2, 3, 1), dtype, layout, g)
        new = [torch.randint(-100, 100, (b, n, *c.shape[2:]), generator=g) for c in caches]
        entries = [e.to(dtype) for e in new]
        positions = torch.randint(-n, m * size + 1, (b,), generator=g)
        counts = torch.randint(-1, n + 2, (b,), generator=g)
        if layout == "sliced":
            entries, positions, counts = [*map(sliced, entries)], spaced(positions), spaced(counts)
        tables = _blocks(b, m, g).to(table_dtype)
        return caches, entries, tables, positions, counts if ragged else None

    name = f"B{b}-M{m}-{size}-n{n}-{dtype_name(dtype)}-{dtype_name(table_dtype)}-{layout}"
    return Case("paged_append_", name + ("-ragged" if ragged else ""), build)


def paged_compact_case(
    b, m, size, p, dtype=torch.float32, *, layout="NHD", id_dtype=torch.int64
) -> Case:
    """A case of `paged_compact_` with three caches and `size` tokens a block."""

    def build(g: Generator) -> Args:
        caches = _pools(b * m, size, (2, 3, 1), dtype, layout, g)
        base = torch.randint(0, max(m * size // 2, 1), (b,), generator=g)
        path = _paths(b, p, m * size, g).to(id_dtype)
        return caches, _blocks(b, m, g), base, path

    name = f"B{b}-M{m}-{size}-P{p}-{dtype_name(dtype)}-{dtype_name(id_dtype)}-{layout}"
    return Case("paged_compact_", name, build)


def paged_truncate_case(b: int, m: int, size: int, *, layout: str = "dense") -> Case:
    """A case of `paged_truncate_` that frees several blocks at once; some tables hold -1."""

    def build(g: Generator) -> Args:
        tables = _blocks(b, m, g)
        lengths = torch.randint(-1, m * size + 3, (b,), generator=g)
        new = lengths - torch.randint(-2, 3 * size, (b,), generator=g)
        if layout == "sliced":
            tables, lengths = sliced(tables), spaced(lengths)
        return tables, lengths, new, size

    return Case("paged_truncate_", f"B{b}-M{m}-{size}-{layout}", build)


def realign_case(
    b: int, s: int, dtype: torch.dtype = torch.float32, *, fill: bool, layout: str = "dense"
) -> Case:
    """A case of `kv_realign_` with shifts in both directions, some beyond [0, S)."""

    def build(g: Generator) -> Args:
        starts = torch.randint(-2, s, (b,), generator=g)
        lengths = torch.randint(0, s + 1, (b,), generator=g)
        shifts = torch.randint(-s // 2, s // 2 + 1, (b,), generator=g)
        return _caches(3, b, s, dtype, layout, g), starts, lengths, shifts, fill

    name = f"B{b}-S{s}-{dtype_name(dtype)}-{'fill' if fill else 'keep'}-{layout}"
    return Case("kv_realign_", name, build)


def ring_case(b, s, window, dtype=torch.float32, *, fill, layout="dense") -> Case:
    """A case of `ring_truncate_` with rings that were overwritten and some that were not."""

    def build(g: Generator) -> Args:
        lengths = torch.randint(0, 4 * s, (b,), generator=g)
        new = lengths - torch.randint(-1, s + 3, (b,), generator=g)
        return _caches(3, b, s, dtype, layout, g), lengths, new, window, fill

    name = f"B{b}-S{s}-W{window}-{dtype_name(dtype)}-{'fill' if fill else 'keep'}-{layout}"
    return Case("ring_truncate_", name, build)


CASES: tuple[Case, ...] = (
    append_case(3, 9, 4),
    append_case(2, 7, 3, bf16, "sliced"),
    append_case(2, 5, 1, torch.int8),
    append_case(0, 5, 2),
    append_case(3, 5, 0),
    truncate_case(4, 9, fill=False),
    truncate_case(4, 9, fill=True),
    truncate_case(3, 6, bf16, fill=True, layout="sliced"),
    truncate_case(3, 6, torch.int8, fill=True),
    truncate_case(0, 6, fill=True),
    compact_case(5, 9, 4),
    compact_case(3, 11, 5, bf16, layout="sliced", id_dtype=torch.int32),
    compact_case(4, 7, 6, torch.int8, id_dtype=torch.int32),
    compact_case(2, 5, 3, torch.float64),
    compact_case(0, 5, 3),
    compact_case(3, 5, 0),
    paged_append_case(3, 4, 4, 5),
    paged_append_case(4, 3, 3, 6, bf16, layout="HND", ragged=False),
    paged_append_case(3, 5, 1, 4, f16, layout="sliced", table_dtype=torch.int64),
    paged_append_case(3, 2, 5, 7, torch.int8),
    paged_append_case(0, 2, 4, 3),
    paged_append_case(2, 0, 4, 3),
    paged_append_case(2, 2, 4, 0, ragged=False),
    paged_compact_case(3, 4, 4, 5),
    paged_compact_case(4, 3, 3, 6, bf16, layout="HND", id_dtype=torch.int32),
    paged_compact_case(2, 5, 1, 4, f16, layout="sliced"),
    paged_compact_case(3, 2, 5, 7, torch.int8, id_dtype=torch.int32),
    paged_compact_case(0, 2, 4, 3),
    paged_compact_case(2, 0, 4, 3),
    paged_compact_case(2, 2, 4, 0),
    paged_truncate_case(5, 6, 4),
    paged_truncate_case(4, 40, 3, layout="sliced"),
    paged_truncate_case(3, 5, 1),
    paged_truncate_case(0, 5, 4),
    paged_truncate_case(3, 0, 4),
    realign_case(6, 9, fill=False),
    realign_case(6, 9, fill=True),
    realign_case(5, 7, bf16, fill=True, layout="sliced"),
    realign_case(4, 6, torch.int8, fill=False),
    realign_case(0, 6, fill=True),
    ring_case(6, 7, 3, fill=True),
    ring_case(6, 7, 7, fill=False),
    ring_case(5, 6, 4, bf16, fill=True, layout="sliced"),
    ring_case(4, 5, 1, torch.int8, fill=True),
    ring_case(0, 6, 4, fill=True),
)
