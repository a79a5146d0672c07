"""Where tensors that an op writes lie in memory.

csrc/torch/arguments/memory.cpp checks the same with the same messages. Fake tensors have no
addresses, so a place here is a storage and an offset in it: two storages over the same memory, as
other libraries may make them, are told apart from one only by C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specdec_kernels.arguments.checks import require


class _Extent(NamedTuple):
    """The bytes from the first to the last element of tensor `number` of a list."""

    begin: int
    number: int
    end: int
    dense: bool  # without gaps


def _extents(tensors: Sequence[Tensor]) -> dict[int, list[_Extent]]:
    """Those in each storage; tensors without elements are left out."""
    found: dict[int, list[_Extent]] = {}
    for i, t in enumerate(tensors):
        if t.numel() > 0:
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            size, begin = t.element_size(), int(t.storage_offset())
            extent = _Extent(begin * size, i, (begin + last + 1) * size, last + 1 == t.numel())
            found.setdefault(t.untyped_storage()._cdata, []).append(extent)
    return found


def check_not_expanded(name: str, t: Tensor) -> None:
    """A tensor that is written must have a place of its own for each element."""
    for d, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        require(
            stride != 0 or n <= 1 or t.numel() == 0,
            f"{name} must not be expanded, because it is written in place, "
            f"got stride 0 in dimension {d}",
        )


def check_written(name: str, tensors: Sequence[Tensor]) -> None:
    """The same for each tensor of a list, of which none may overlap another.

    No two may begin at one place, and none may begin inside one without gaps. Views with gaps may
    lie in each other's gaps; whether they do is not checked.
    """
    for i, t in enumerate(tensors):
        check_not_expanded(f"{name}[{i}]", t)
    if pair := _overlapping(tensors):
        raise RuntimeError(
            f"{name}[{max(pair)}] must not overlap {name}[{min(pair)}], "
            "because both are written in place"
        )


def _overlapping(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    for extents in _extents(tensors).values() if len(tensors) > 1 else ():
        before = dense = None  # the one before in memory, and of those without gaps the last one
        for e in sorted(extents) if len(extents) > 1 else ():
            if before is not None and before.begin == e.begin:
                return before.number, e.number
            before = e
            if dense is not None and e.begin < dense.end:
                return dense.number, e.number
            if e.dense:
                dense = e
    return None


def read_first(tensors: Sequence[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with a copy in place of each that lies in the storage of a written one.

    So an op reads all of its arguments before it writes.
    """
    storages = {t.untyped_storage()._cdata for t in written}
    return [t.clone() if t.untyped_storage()._cdata in storages else t for t in tensors]
