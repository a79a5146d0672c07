"""Cases of the cache ops. Values are whole numbers, which every dtype holds exactly."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from proofs.case import Args, Case, sliced, spaced
from specdec_kernels.arguments.checks import dtype_name

f32, bf16, f16, i8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
i32, i64 = torch.int32, torch.int64


def _integers(low: int, high: int, shape: tuple[int, ...], g: Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=g)


def _dense(layers: int, b: int, s: int, g: Generator) -> list[Tensor]:
    """Caches [B, H, S, D] of two or three heads, and more slots than s."""
    heads = [2 + i % 2 for i in range(layers)]
    return [_integers(-100, 100, (b, h, s + h, 12), g) for h in heads]


def _pools(blocks: int, size: int, hnd: bool, g: Generator) -> list[Tensor]:
    """Caches [blocks, size, H, D]; with ``hnd``, heads come before slots in memory."""
    made = [(blocks, h, size, 12) if hnd else (blocks, size, h, 12) for h in (2, 3, 1)]
    caches = [_integers(-100, 100, shape, g) for shape in made]
    return [c.transpose(1, 2) for c in caches] if hnd else caches


def _paths(b: int, p: int, nodes: int, g: Generator) -> Tensor:
    """[b, p] int64: increasing node ids below `nodes`, then -1.

    The last sequence ends with an id that is too low to be valid.
    """
    made = torch.full((b, p), -1)
    for i, row in enumerate(made):
        n = int(_integers(0, min(p, nodes) + 1, (), g))
        row[:n] = torch.randperm(nodes, generator=g)[:n].sort().values
        if i and i == b - 1 and n > 1:
            row[n - 1] = row[0]
    return made


def _blocks(b: int, m: int, g: Generator) -> Tensor:
    """[b, m] int32 block tables: random distinct blocks, the last of every other sequence is -1."""
    tables = torch.randperm(b * m, generator=g).to(i32).view(b, m)
    tables[1::2, m - 1 :] = -1
    return tables


def _arguments(op: str, b: int, z: tuple[int, ...], hnd: bool, g: Generator) -> list[object]:
    """The arguments before layout and dtypes; z: the sizes that an op has beside b."""

    def vector(low: int, high: int) -> Tensor:
        return _integers(low, high, (b,), g)

    def entries(caches: list[Tensor], n: int, paged: bool) -> list[Tensor]:
        shapes = [(b, n, *c.shape[2:]) if paged else (b, c.shape[1], n, 12) for c in caches]
        return [_integers(-100, 100, shape, g) for shape in shapes]

    if op.startswith("paged_"):
        m, size = z[:2]
        tables, slots = _blocks(b, m, g), m * size
        if op == "paged_truncate_":
            lengths = vector(-1, slots + 3)
            return [tables, lengths, lengths - vector(-2, 3 * size), size]
        caches = _pools(b * m, size, hnd, g)
        if op == "paged_compact_":
            return [caches, tables, vector(0, max(slots // 2, 1)), _paths(b, z[2], slots, g)]
        new = entries(caches, z[2], paged=True)
        return [caches, new, tables, vector(-z[2], slots + 1), vector(-1, z[2] + 2)]
    s, caches = z[0], _dense(4 if op in ("kv_append_", "kv_compact_") else 3, b, z[0], g)
    if op == "kv_append_":
        return [caches, entries(caches, z[1], paged=False), vector(-z[1], s + 1)]
    if op == "kv_compact_":
        return [caches, vector(-1, s + 1), _paths(b, z[1], s, g)]
    if op == "kv_realign_":
        return [caches, vector(-2, s), vector(0, s + 1), vector(-s // 2, s // 2 + 1)]
    if op == "kv_truncate_":
        lengths = vector(0, s + 1)
        return [caches, lengths, lengths + vector(-4, 2)]
    lengths = vector(0, 4 * s)
    return [caches, lengths, lengths - vector(-1, s + 3), z[1]]


def kv_case(op: str, b: int, *z: int, dtype=f32, layout="dense", ids=None, fill=None, ragged=True):
    """A case of a cache op, in which some indices lie outside of the caches.

    z: slots S of dense caches, then new entries, nodes of a path or a window; of paged ones the
        columns of tables, the slots of a block, then entries or nodes.
    layout: "dense", "sliced" (views of wider tensors) or "HND".
    ids: the dtype of tables or paths. fill: `zero_fill`.
    ragged: whether `paged_append_` has counts.
    """

    def build(g: Generator) -> Args:
        def laid_out(x: object) -> object:
            if isinstance(x, list):
                return [laid_out(y.to(dtype)) for y in x]
            if not isinstance(x, Tensor):
                return x
            if ids is not None and x.dim() == 2:
                x = x.to(ids)
            return x if layout != "sliced" else spaced(x) if x.dim() == 1 else sliced(x)

        given = _arguments(op, b, z, layout == "HND", g)
        if not ragged:
            given[-1] = None
        return (*map(laid_out, given), *([] if fill is None else [fill]))

    words = [f"B{b}", *map(str, z), dtype_name(dtype), layout]
    words += [*([dtype_name(ids)] if ids else []), *(["whole"] if not ragged else [])]
    return Case(
        op, "-".join([*words, *([] if fill is None else ["fill" if fill else "keep"])]), build
    )


CASES: tuple[Case, ...] = (
    kv_case("kv_append_", 3, 9, 4), kv_case("kv_append_", 2, 7, 3, dtype=bf16, layout="sliced"),
    kv_case("kv_append_", 2, 5, 1, dtype=i8), kv_case("kv_append_", 0, 5, 2),
    kv_case("kv_append_", 3, 5, 0), kv_case("kv_truncate_", 4, 9, fill=False),
    kv_case("kv_truncate_", 4, 9, fill=True),
    kv_case("kv_truncate_", 3, 6, dtype=bf16, fill=True, layout="sliced"),
    kv_case("kv_truncate_", 3, 6, dtype=i8, fill=True), kv_case("kv_truncate_", 0, 6, fill=True),
    kv_case("kv_compact_", 5, 9, 4),
    kv_case("kv_compact_", 3, 11, 5, dtype=bf16, layout="sliced", ids=i32),
    kv_case("kv_compact_", 4, 7, 6, dtype=i8, ids=i32),
    kv_case("kv_compact_", 2, 5, 3, dtype=torch.float64), kv_case("kv_compact_", 0, 5, 3),
    kv_case("kv_compact_", 3, 5, 0), kv_case("paged_append_", 3, 4, 4, 5),
    kv_case("paged_append_", 4, 3, 3, 6, dtype=bf16, layout="HND", ragged=False),
    kv_case("paged_append_", 3, 5, 1, 4, dtype=f16, layout="sliced", ids=i64),
    kv_case("paged_append_", 3, 2, 5, 7, dtype=i8), kv_case("paged_append_", 0, 2, 4, 3),
    kv_case("paged_append_", 2, 0, 4, 3), kv_case("paged_append_", 2, 2, 4, 0, ragged=False),
    kv_case("paged_compact_", 3, 4, 4, 5),
    kv_case("paged_compact_", 4, 3, 3, 6, dtype=bf16, layout="HND", ids=i32),
    kv_case("paged_compact_", 2, 5, 1, 4, dtype=f16, layout="sliced"),
    kv_case("paged_compact_", 3, 2, 5, 7, dtype=i8, ids=i32), kv_case("paged_compact_", 0, 2, 4, 3),
    kv_case("paged_compact_", 2, 0, 4, 3), kv_case("paged_compact_", 2, 2, 4, 0),
    kv_case("paged_truncate_", 5, 6, 4), kv_case("paged_truncate_", 4, 40, 3, layout="sliced"),
    kv_case("paged_truncate_", 3, 5, 1), kv_case("paged_truncate_", 0, 5, 4),
    kv_case("paged_truncate_", 3, 0, 4), kv_case("kv_realign_", 6, 9, fill=False),
    kv_case("kv_realign_", 6, 9, fill=True),
    kv_case("kv_realign_", 5, 7, dtype=bf16, fill=True, layout="sliced"),
    kv_case("kv_realign_", 4, 6, dtype=i8, fill=False), kv_case("kv_realign_", 0, 6, fill=True),
    kv_case("ring_truncate_", 6, 7, 3, fill=True), kv_case("ring_truncate_", 6, 7, 7, fill=False),
    kv_case("ring_truncate_", 5, 6, 4, dtype=bf16, fill=True, layout="sliced"),
    kv_case("ring_truncate_", 4, 5, 1, dtype=i8, fill=True),
    kv_case("ring_truncate_", 0, 6, 4, fill=True),
)  # fmt: skip
