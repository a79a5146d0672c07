"""Validation of the arguments of the cache ops: one function for each op, named as its room.

The fake kernels, the Triton provider and the reference call them; csrc/torch/arguments/kv.cpp and
the ops in csrc/torch/ops validate the same with the same messages. A slot is one token's place in a
cache, `B` counts sequences, `S` slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.arguments.checks import (
    IDS,
    check_ids,
    check_same_device,
    check_typed,
    check_vector,
    dtype_name,
    require,
    shape,
)
from specdec_kernels.arguments.memory import check_not_expanded, check_written


def check_batch(name: str, t: Tensor) -> int:
    """The tensor must be [B] int64; it defines B for the other arguments."""
    require(t.dim() == 1, f"{name} must be [B], got {shape(t)}")
    check_typed(name, t, torch.int64, t.device, name)
    return t.shape[0]


def _contiguous_rows(name: str, t: Tensor) -> None:
    require(
        t.stride(-1) == 1 or t.shape[-1] <= 1,
        f"{name} must have a contiguous last dimension, got stride {t.stride(-1)}",
    )


def check_caches(
    name: str,
    tensors: Sequence[Tensor],
    b: int,
    device: torch.device,
    of: str = "positions or lengths",
) -> None:
    for i, t in enumerate(tensors):
        require(
            t.dim() == 4 and t.shape[0] == b,
            f"{name}[{i}] must be [B, H, S, D] with B = {b}, got {shape(t)}",
        )
        _contiguous_rows(f"{name}[{i}]", t)
        check_same_device(f"{name}[{i}]", t, device, of)


def check_paged_caches(tensors: Sequence[Tensor], device: torch.device) -> None:
    for i, t in enumerate(tensors):
        require(
            t.dim() == 4,
            f"caches[{i}] must be [num_blocks, block_size, H, D], got {shape(t)}",
        )
        n, size = tensors[0].shape[:2]
        require(
            t.shape[:2] == (n, size),
            f"caches[{i}] must be [num_blocks, block_size, H, D] = [{n}, {size}, H, D], "
            f"got {shape(t)}",
        )
        _contiguous_rows(f"caches[{i}]", t)
        check_same_device(f"caches[{i}]", t, device, "base")


def check_block_tables(t: Tensor, b: int, device: torch.device, of: str) -> None:
    require(
        t.dim() == 2 and t.shape[0] == b,
        f"block_tables must be [B, M] with B = {b}, got {shape(t)}",
    )
    check_typed("block_tables", t, torch.int32, device, of)


def check_path(t: Tensor, b: int, device: torch.device) -> None:
    require(t.dim() == 2 and t.shape[0] == b, f"path must be [B, P] with B = {b}, got {shape(t)}")
    check_ids("path", t)
    check_same_device("path", t, device, "base")


def append(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    b = check_batch("positions", positions)
    require(
        len(caches) == len(entries),
        f"entries must have one tensor for each of the {len(caches)} caches, got {len(entries)}",
    )
    check_caches("caches", caches, b, positions.device)
    check_caches("entries", entries, b, positions.device)
    for i, (c, e) in enumerate(zip(caches, entries, strict=True)):
        require(
            e.shape[1] == c.shape[1] and e.shape[3] == c.shape[3],
            f"entries[{i}] must be [B, H, n, D] = [{b}, {c.shape[1]}, n, {c.shape[3]}], "
            f"got {shape(e)}",
        )
        require(
            e.dtype == c.dtype,
            f"entries[{i}] must be {dtype_name(c.dtype)} like its cache, got {dtype_name(e.dtype)}",
        )
    check_written("caches", caches)


def truncate(caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor) -> None:
    b = check_batch("lengths", lengths)
    check_vector("new_lengths", new_lengths, b, torch.int64, lengths.device, "lengths")
    check_caches("caches", caches, b, lengths.device)
    check_not_expanded("lengths", lengths)


def compact(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    b = check_batch("base", base)
    check_path(path, b, base.device)
    check_caches("caches", caches, b, base.device, "base")
    check_written("caches", caches)


def paged_compact(
    caches: Sequence[Tensor], block_tables: Tensor, base: Tensor, path: Tensor
) -> None:
    b = check_batch("base", base)
    check_path(path, b, base.device)
    check_block_tables(block_tables, b, base.device, "base")
    check_paged_caches(caches, base.device)
    check_written("caches", caches)


def paged_truncate(
    block_tables: Tensor, lengths: Tensor, new_lengths: Tensor, block_size: int
) -> None:
    b = check_batch("lengths", lengths)
    check_vector("new_lengths", new_lengths, b, torch.int64, lengths.device, "lengths")
    check_block_tables(block_tables, b, lengths.device, "lengths")
    check_not_expanded("block_tables", block_tables)
    check_not_expanded("lengths", lengths)
    require(block_size >= 1, f"block_size must be at least 1, got {block_size}")


def realign(caches: Sequence[Tensor], starts: Tensor, lengths: Tensor, shifts: Tensor) -> None:
    b = check_batch("starts", starts)
    check_vector("lengths", lengths, b, torch.int64, starts.device, "starts")
    check_vector("shifts", shifts, b, torch.int64, starts.device, "starts")
    check_caches("caches", caches, b, starts.device, "starts")
    check_written("caches", caches)


def ring_truncate(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, window: int
) -> None:
    b = check_batch("lengths", lengths)
    check_vector("new_lengths", new_lengths, b, torch.int64, lengths.device, "lengths")
    check_caches("caches", caches, b, lengths.device, "lengths")
    check_not_expanded("lengths", lengths)
    require(window >= 1, f"window must be at least 1, got {window}")
    for i, t in enumerate(caches):
        require(
            window <= t.shape[2],
            f"window must be at most the slots of caches[{i}], {t.shape[2]}, got {window}",
        )


def state_select(states: Sequence[Tensor], index: Tensor) -> None:
    """`state_select_` is no op of its own, so torch.compile traces these checks.

    They build a message only where it is raised, for a traced message would cost every call.
    """
    if index.dim() != 1:
        raise RuntimeError(f"index must be [B], got {shape(index)}")
    if index.dtype not in IDS:
        raise RuntimeError(f"index must be int32 or int64, got {dtype_name(index.dtype)}")
    b = index.shape[0]
    for i, t in enumerate(states):
        if t.dim() < 2 or t.shape[0] != b:
            raise RuntimeError(f"states[{i}] must be [B, S, ...] with B = {b}, got {shape(t)}")
        if t.numel() > 0 and not t[0, 0].is_contiguous():
            raise RuntimeError(
                f"states[{i}] must have contiguous trailing dimensions, got {t.stride()}"
            )
        if t.device != index.device:
            check_same_device(f"states[{i}]", t, index.device, "index")
