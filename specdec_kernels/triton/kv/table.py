"""The caches of a call as a table of addresses, strides and sizes that one launch reads.

Terms of this room:

slot    One token's place in a cache.
word    The unit of a copy: the widest integer (of 1, 2, 4 or 8 bytes) that every address, stride
        and row of a cache is a multiple of. Bytes are copied whatever their dtype is.
row     The bytes of one token in one head.
table   One line of int64 fields for each cache (`FIELDS`).
group   The caches with words of one width; a launch serves one group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch

# Fields of the table. Four describe the addresses of a cache, and four those of its entries.
ADDRESS = tl.constexpr(0)
SEQUENCE_STRIDE = tl.constexpr(1)
HEAD_STRIDE = tl.constexpr(2)
SLOT_STRIDE = tl.constexpr(3)
HEADS = tl.constexpr(4)
SLOTS = tl.constexpr(5)
WORDS = tl.constexpr(6)  # of a token in one head
ENTRIES = tl.constexpr(7)  # where the four of the entries start
COUNT = tl.constexpr(11)  # entries of one sequence
FIELDS = tl.constexpr(12)
ENCODED_BIT = 62  # see `encoded`
ENCODED = tl.constexpr(1 << ENCODED_BIT)
CACHES = 128  # whose addresses a launch takes; with them its parameters have half of 4 KiB
WIDEST = 8  # bytes of a word
# Words of one program. With fewer words than threads, two threads would own one word.
BLOCK = 512
OPTIONS = {"num_warps": 4}
MAX_BLOCKS = 1024  # of one sequence; the loops of the kernels stride over the rest
# The number of dropped or vacated slots is known on the device only; a round drops a few.
TYPICAL_SLOTS = 8


class Strides(NamedTuple):
    """Address and strides of a tensor in bytes; the stride of a dimension of size 1 is 0."""

    address: int = 0
    sequence: int = 0
    head: int = 0
    slot: int = 0


class Group(NamedTuple):
    """The caches of one launch."""

    table: Tensor  # [caches, FIELDS] int64
    word_bytes: int
    words: int  # of one token, the most of any cache
    typical_slots: int  # slots that a call drops or vacates
    entries: int  # of one sequence, the most of any cache


@triton.jit
def word_pointer(address, BYTES: tl.constexpr):
    """An address as a pointer to integers of BYTES bytes."""
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
def cache_at(fields, b, BYTES: tl.constexpr):
    """(pointer to sequence or block b, head stride, slot stride) of one cache, in words."""
    pointer = word_pointer(tl.load(fields + ADDRESS), BYTES) + b * tl.load(fields + SEQUENCE_STRIDE)
    return pointer, tl.load(fields + HEAD_STRIDE), tl.load(fields + SLOT_STRIDE)


@triton.jit
def sizes_of(fields):
    """(heads, slots, words of a token in one head) of one cache."""
    return tl.load(fields + HEADS), tl.load(fields + SLOTS), tl.load(fields + WORDS)


def encoded(address: int) -> int:
    """An address as an odd integer above 2^62.

    Triton gives the integers of a tuple types by their values, and compiles a kernel anew where one
    becomes 1 or a multiple of 16. Of these integers none differs from another in that.
    """
    return (1 << ENCODED_BIT) + 2 * address + 1


@launch.kernel()
def write_rows(
    table, addresses, entry_addresses,
    f1: tl.int64, f2: tl.int64, f3: tl.int64, f4: tl.int64, f5: tl.int64, f6: tl.int64,
    f8: tl.int64, f9: tl.int64, f10: tl.int64, f11: tl.int64,
):  # fmt: skip
    """Grid (caches,): write the rows of caches that differ in their addresses alone."""
    i = tl.program_id(0)
    address = tl.full([], 0, tl.int64)
    entry_address = tl.full([], 0, tl.int64)
    for j in tl.static_range(len(addresses)):
        address = tl.where(i == j, addresses[j], address)
        entry_address = tl.where(i == j, entry_addresses[j], entry_address)
    row = table + i * FIELDS
    tl.store(row + ADDRESS, (address & (ENCODED - 1)) >> 1)
    tl.store(row + 1, f1)
    tl.store(row + 2, f2)
    tl.store(row + 3, f3)
    tl.store(row + 4, f4)
    tl.store(row + 5, f5)
    tl.store(row + 6, f6)
    tl.store(row + ENTRIES, (entry_address & (ENCODED - 1)) >> 1)
    tl.store(row + 8, f8)
    tl.store(row + 9, f9)
    tl.store(row + 10, f10)
    tl.store(row + 11, f11)


class Layout(NamedTuple):
    """Where a tensor is in memory."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in entries
    entry_bytes: int


Layouts = tuple[Layout, ...]


def _layout(t: Tensor) -> Layout:
    return Layout(t.data_ptr(), t.shape, t.stride(), t.element_size())


def _strides(t: Layout, slot: int) -> Strides:
    steps = (t.stride[i] * t.entry_bytes if t.shape[i] > 1 else 0 for i in (0, 3 - slot, slot))
    return Strides(t.address, *steps)


def _row(cache: Layout, entry: Layout | None, slot: int) -> tuple[int, list[int]]:
    """(bytes of a word, the fields of one cache and its entries)."""
    to, source = _strides(cache, slot), _strides(entry, slot) if entry else Strides()
    shape = cache.shape
    heads, row_bytes = shape[3 - slot], shape[3] * cache.entry_bytes
    if to.head == row_bytes and (entry is None or source.head == row_bytes):
        # Adjacent heads of a token are copied as one row.
        to, source = to._replace(head=0), source._replace(head=0)
        row_bytes, heads = row_bytes * heads, 1
    bits = functools.reduce(lambda x, y: x | y, (*to, *source, row_bytes), WIDEST)
    word = bits & -bits
    steps, entry_steps = ([n // word for n in strides[1:]] for strides in (to, source))
    count = entry.shape[slot] if entry else 0
    sizes = [heads, shape[slot], row_bytes // word]
    return word, [to.address, *steps, *sizes, source.address, *entry_steps, count]


def _but_addresses(row: list[int]) -> list[int]:
    return [n for field, n in enumerate(row) if field not in (ADDRESS.value, ENTRIES.value)]


def _grouped(caches: Layouts, entries: Layouts | None, slot: int) -> dict[int, list[list[int]]]:
    """Bytes of a word -> the rows of its caches; those that differ in addresses alone adjoin."""
    groups: dict[int, list[list[int]]] = {}
    for i, cache in enumerate(caches):
        entry = entries[i] if entries is not None else None
        if 0 in cache.shape or (entry and 0 in entry.shape):
            continue
        word, row = _row(cache, entry, slot)
        groups.setdefault(word, []).append(row)
    return {word: sorted(rows, key=_but_addresses) for word, rows in groups.items()}


def _group(rows: list[list[int]], word: int, table: Tensor) -> Group:
    words = max(row[HEADS.value] * row[WORDS.value] for row in rows)
    slots, entries = (max(row[i.value] for row in rows) for i in (SLOTS, COUNT))
    return Group(table, word, words, min(slots, TYPICAL_SLOTS), entries)


def _write(table: Tensor, rows: list[list[int]]) -> None:
    """Fill a table, by one launch for each CACHES caches that differ in their addresses alone."""
    begin = 0
    for fields, alike in itertools.groupby(rows, _but_addresses):
        of_caches = [[encoded(row[i.value]) for i in (ADDRESS, ENTRIES)] for row in alike]
        for first in range(0, len(of_caches), CACHES):
            part = of_caches[first : first + CACHES]
            padded = part + [[encoded(0)] * 2] * (CACHES - len(part))
            write_rows[(len(part),)](
                table[begin:], *zip(*padded, strict=True), *fields, num_warps=1
            )
            begin += len(part)


@functools.cache
def _compile_writer(device: torch.device) -> None:
    """Compile `write_rows` before a CUDA graph is captured, where no code can be loaded."""
    _write(_empty(1, device), [[0] * FIELDS.value])


def _empty(rows: int, device: torch.device) -> Tensor:
    return torch.empty((rows, FIELDS.value), dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=64)
def _uploaded(
    device: torch.device, stream: int, caches: Layouts, entries: Layouts | None, slot: int
) -> list[Group]:
    """`stream` is part of the key, because the copy is ordered only before work on its stream."""
    cuda = device.type == "cuda"
    if cuda:
        _compile_writer(device)
    groups = []
    for word, rows in _grouped(caches, entries, slot).items():
        host = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=cuda)
        groups.append(_group(rows, word, host.to(device, non_blocking=True)))
    return groups


def _captured(
    device: torch.device, caches: Layouts, entries: Layouts | None, slot: int
) -> list[Group]:
    """Tables that the CUDA graph being captured writes itself, into memory of its own.

    A table of `_uploaded` could be evicted and freed while the graph still reads it.
    """
    groups = []
    for word, rows in _grouped(caches, entries, slot).items():
        table = _empty(len(rows), device)
        _write(table, rows)
        groups.append(_group(rows, word, table))
    return groups


def groups_of(
    device: torch.device,
    caches: Sequence[Tensor],
    entries: Sequence[Tensor] | None = None,
    slot: int = 2,
) -> list[Group]:
    """The groups of the caches that are not empty; `slot` is the dimension of the slots, 1 or 2."""
    layouts = tuple(map(_layout, caches))
    entry_layouts = None if entries is None else tuple(map(_layout, entries))
    if device.type != "cuda":
        return _uploaded(device, 0, layouts, entry_layouts, slot)
    if torch.cuda.is_current_stream_capturing():
        return _captured(device, layouts, entry_layouts, slot)
    stream = torch.cuda.current_stream(device).cuda_stream
    return _uploaded(device, stream, layouts, entry_layouts, slot)


def start(kernel: Any, group: Group, batch: int, rows: int, *args: Any, **constants: Any) -> None:
    """Launch with programs for `rows` tokens of each sequence; loops stride over any others."""
    blocks = min(-(-group.words * rows // BLOCK), MAX_BLOCKS)
    kernel[(batch * len(group.table), blocks)](
        group.table, len(group.table), *args, BYTES=group.word_bytes, BLOCK=BLOCK,
        **constants, **OPTIONS,
    )  # fmt: skip
