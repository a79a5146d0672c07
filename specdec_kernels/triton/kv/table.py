"""The caches of a call as a table of addresses, strides and sizes that one launch reads.

Bytes move, whatever the dtype: a lane is the widest integer that divides every address of a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FIELDS = tl.constexpr(12)  # int64 a cache
WIDEST = 8  # bytes a lane
# Lanes a program; with fewer than its threads some would be held twice.
BLOCK = 512
OPTIONS = {"num_warps": 4}
MAX_BLOCKS = 1024  # a sequence; what is left over, the stride of the loop takes
# How many slots are dropped or left is known on the device alone; a round drops a few.
TYPICAL_SLOTS = 8


class Span(NamedTuple):
    """Addresses of a tensor, in bytes; a stride that nobody steps along is 0."""

    address: int = 0
    sequence: int = 0
    head: int = 0
    slot: int = 0


class Group(NamedTuple):
    """Caches whose lanes are equally wide: those of one launch."""

    table: Tensor  # [caches, FIELDS] int64
    lane_bytes: int
    lanes: int  # at most of one token
    typical_slots: int  # that a call drops or leaves behind
    entries: int  # at most, of one sequence


@triton.jit
def lane_pointer(address, BYTES: tl.constexpr):
    """An address as a pointer to integers of so many bytes."""
    if BYTES == 8:
        pointer = address.to(tl.pointer_type(tl.int64))
    elif BYTES == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    elif BYTES == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int8))
    return pointer


@triton.jit
def cache_at(row, b, BYTES: tl.constexpr):
    """(sequence or block b, head stride, slot stride) of a row of the table, in lanes."""
    pointer = lane_pointer(tl.load(row), BYTES) + b * tl.load(row + 1)
    return pointer, tl.load(row + 2), tl.load(row + 3)


@triton.jit
def sizes_of(row):
    """(heads, slots, lanes of a token in one head) of a row of the table."""
    return tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)


@triton.jit(do_not_specialize=[*range(1, FIELDS.value + 1)])
def write_row(
    row, f0: tl.int64, f1: tl.int64, f2: tl.int64, f3: tl.int64, f4: tl.int64, f5: tl.int64,
    f6: tl.int64, f7: tl.int64, f8: tl.int64, f9: tl.int64, f10: tl.int64, f11: tl.int64,
):  # fmt: skip
    tl.store(row, f0)
    tl.store(row + 1, f1)
    tl.store(row + 2, f2)
    tl.store(row + 3, f3)
    tl.store(row + 4, f4)
    tl.store(row + 5, f5)
    tl.store(row + 6, f6)
    tl.store(row + 7, f7)
    tl.store(row + 8, f8)
    tl.store(row + 9, f9)
    tl.store(row + 10, f10)
    tl.store(row + 11, f11)


Layout = tuple[int, tuple[int, ...], tuple[int, ...], int]  # address, shape, stride, item size
Layouts = tuple[Layout, ...]


def _layout(t: Tensor) -> Layout:
    return t.data_ptr(), t.shape, t.stride(), t.element_size()


def _span(layout: Layout, slot: int) -> Span:
    address, shape, stride, item = layout
    steps = (stride[i] * item if shape[i] > 1 else 0 for i in (0, 3 - slot, slot))
    return Span(address, *steps)


def _row(cache: Layout, entry: Layout | None, slot: int) -> tuple[int, list[int]]:
    """(bytes of a lane, the fields of one cache)."""
    to, source = _span(cache, slot), _span(entry, slot) if entry else Span()
    shape = cache[1]
    heads, row_bytes = shape[3 - slot], shape[3] * cache[3]
    if entry is None and to.head == row_bytes:  # the heads of a token side by side move as one row
        to, row_bytes, heads = to._replace(head=0), row_bytes * heads, 1
    bits = functools.reduce(lambda x, y: x | y, (*to, *source, row_bytes), WIDEST)
    lane = bits & -bits
    steps, entry_steps = ([n // lane for n in span[1:]] for span in (to, source))
    count = entry[1][slot] if entry else 0
    sizes = [heads, shape[slot], row_bytes // lane]
    return lane, [to.address, *steps, *sizes, source.address, *entry_steps, count]


def _grouped(caches: Layouts, entries: Layouts | None, slot: int) -> dict[int, list[list[int]]]:
    groups: dict[int, list[list[int]]] = {}
    for i, cache in enumerate(caches):
        entry = entries[i] if entries is not None else None
        if 0 in cache[1] or (entry and 0 in entry[1]):
            continue
        lane, row = _row(cache, entry, slot)
        groups.setdefault(lane, []).append(row)
    return groups


def _group(rows: list[list[int]], lane: int, table: Tensor) -> Group:
    lanes = max(row[4] * row[6] for row in rows)
    slots, entries = (max(row[i] for row in rows) for i in (5, 11))
    return Group(table, lane, lanes, min(slots, TYPICAL_SLOTS), entries)


@functools.cache
def _compile_writer(device: torch.device) -> None:
    """Before a CUDA graph is captured: there no code can be loaded."""
    write_row[(1,)](_empty(1, device), *[0] * FIELDS.value, num_warps=1)


def _empty(rows: int, device: torch.device) -> Tensor:
    return torch.empty((rows, FIELDS.value), dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=64)
def _uploaded(
    device: torch.device, stream: int, caches: Layouts, entries: Layouts | None, slot: int
) -> list[Group]:
    """`stream` is part of the key: on another the copy might not have arrived."""
    cuda = device.type == "cuda"
    if cuda:
        _compile_writer(device)
    groups = []
    for lane, rows in _grouped(caches, entries, slot).items():
        host = torch.tensor(rows, dtype=torch.int64, pin_memory=cuda)
        groups.append(_group(rows, lane, host.to(device, non_blocking=True)))
    return groups


def _captured(
    device: torch.device, caches: Layouts, entries: Layouts | None, slot: int
) -> list[Group]:
    """Written by the CUDA graph that is being captured, into memory of its own.

    A table from elsewhere could be evicted and freed while the graph still reads it.
    """
    groups = []
    for lane, rows in _grouped(caches, entries, slot).items():
        table = _empty(len(rows), device)
        for at, row in zip(table, rows, strict=True):
            write_row[(1,)](at, *row, num_warps=1)
        groups.append(_group(rows, lane, table))
    return groups


def groups_of(
    device: torch.device,
    caches: Sequence[Tensor],
    entries: Sequence[Tensor] | None = None,
    slot: int = 2,
) -> list[Group]:
    """Tables of the caches that hold anything; `slot` is the dimension of the slots, 1 or 2."""
    layouts = tuple(map(_layout, caches))
    entry_layouts = None if entries is None else tuple(map(_layout, entries))
    if device.type != "cuda":
        return _uploaded(device, 0, layouts, entry_layouts, slot)
    if torch.cuda.is_current_stream_capturing():
        return _captured(device, layouts, entry_layouts, slot)
    stream = torch.cuda.current_stream(device).cuda_stream
    return _uploaded(device, stream, layouts, entry_layouts, slot)


def start(kernel: Any, group: Group, batch: int, rows: int, *args: Any, **constants: Any) -> None:
    """Launch for `rows` rows of lanes a sequence; the kernel strides over what is left."""
    blocks = min(-(-group.lanes * rows // BLOCK), MAX_BLOCKS)
    kernel[(batch * len(group.table), blocks)](
        group.table, len(group.table), *args, BYTES=group.lane_bytes, BLOCK=BLOCK,
        **constants, **OPTIONS,
    )  # fmt: skip
