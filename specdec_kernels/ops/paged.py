"""In-place changes of paged KV caches, all layers in one launch.

The cache is a pool of blocks with `block_size` slots each. Slot s of sequence b is slot
`s % block_size` of block `block_tables[b, s // block_size]`. As for dense caches, no op is
differentiable, version counters rise, and what is written must not be expanded or overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion, in_place
from ..arguments.validation import fake_kernel


class FreedBlocks(NamedTuple):
    """The blocks that `paged_truncate_` removed from the tables, for the allocator to reuse.

    Attributes:
        blocks: [B, M], the freed blocks of each sequence in the order of its table, then -1. The
            dtype is that of the tables.
        num_freed: [B] int32, how many.
    """

    blocks: Tensor
    num_freed: Tensor


def paged_append_(
    caches: Sequence[Tensor],
    entries: Sequence[Tensor],
    block_tables: Tensor,
    positions: Tensor,
    counts: Tensor | None = None,
) -> None:
    """Write new entries into paged caches, for each sequence from its own position on.

    Slot `positions[b] + j` of sequence b takes `entries[i][b, j]`, for j below `counts[b]`. An
    entry is dropped whose slot lies outside the table, or whose block is not in [0, num_blocks).
    No slot may be written twice, by one sequence or by two: blocks that sequences share belong to
    the prefix.

    Args:
        caches: tensors [num_blocks, block_size, H, D] of any dtype, changed in place: keys, values
            and scales of any layers, whose H, D and dtype may differ. Any strides will do, so that
            a cache [num_blocks, H, block_size, D] is passed as its transposed view, but the last
            dimension must be contiguous.
        entries: one tensor [B, n, H, D] for each cache, of the same dtype, as projections return
            it. Entries that lie in a cache are read before anything is written.
        block_tables: [B, M] int32 or int64.
        positions: [B] int32 or int64, the slot of the first entry: the length before the call.
        counts: [B] int32 or int64, how many of its n entries a sequence has; the others are
            padding. None: n.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names it.
        TypeError: an argument is not a tensor, or not a list of tensors.

    >>> cache, new = torch.zeros(3, 2, 1, 1), torch.tensor([1.0, 2, 3]).view(1, 3, 1, 1)
    >>> tables = torch.tensor([[2, 0]], dtype=torch.int32)
    >>> paged_append_([cache], [new], tables, torch.tensor([1]), torch.tensor([2]))
    >>> cache.flatten()
    tensor([2., 0., 0., 0., 0., 1.])
    """
    conversion.require_tensors(block_tables=block_tables, positions=positions)
    conversion.require_tensors_or_none(counts=counts)
    caches = conversion.require_tensor_list(caches, "caches")
    entries = conversion.require_tensor_list(entries, "entries")
    in_place.check_leaves(caches, "caches")
    ops.paged_append_.default(caches, entries, block_tables, positions, counts)
    in_place.raise_versions(caches)


@fake_kernel("paged_append_")
def _(
    caches: Sequence[Tensor],
    entries: Sequence[Tensor],
    block_tables: Tensor,
    positions: Tensor,
    counts: Tensor | None,
) -> None:
    """Nothing is returned."""


def paged_compact_(
    caches: Sequence[Tensor], block_tables: Tensor, base: Tensor, path: Tensor
) -> None:
    """Move the accepted path of a token tree to the end of the committed prefix, in paged caches.

    The moves are those of `kv_compact_`. The path of a sequence also ends at a slot beyond its
    table, or whose block is not in [0, num_blocks). Among the slots that move no block may occur
    twice, in one sequence or in two: blocks that sequences share belong to the prefix, not to the
    tree.

    Args:
        caches: tensors [num_blocks, block_size, H, D] of any dtype, changed in place; H, D and the
            dtype may differ. Any strides will do, so that a cache [num_blocks, H, block_size, D] is
            passed as its transposed view, but the last dimension must be contiguous.
        block_tables: [B, M] int32 or int64.
        base: [B] int32 or int64, the slot of node 0, as in `kv_compact_`.
        path: [B, P] int32 or int64, node ids from the root downwards, then -1, as `verify_tree`
            returns them.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names it.
        TypeError: an argument is not a tensor, or not a list of tensors.

    >>> cache = torch.arange(6.0).view(3, 2, 1, 1)
    >>> tables = torch.tensor([[2, 0]], dtype=torch.int32)
    >>> paged_compact_([cache], tables, torch.tensor([0]), torch.tensor([[0, 3, -1]]))
    >>> cache.flatten()
    tensor([0., 1., 2., 3., 4., 1.])
    """
    conversion.require_tensors(block_tables=block_tables, base=base, path=path)
    caches = conversion.require_tensor_list(caches, "caches")
    in_place.check_leaves(caches, "caches")
    ops.paged_compact_.default(caches, block_tables, base, path)
    in_place.raise_versions(caches)


@fake_kernel("paged_compact_")
def _(caches: Sequence[Tensor], block_tables: Tensor, base: Tensor, path: Tensor) -> None:
    """Nothing is returned."""


def paged_truncate_(
    block_tables: Tensor, lengths: Tensor, new_lengths: Tensor, block_size: int
) -> FreedBlocks:
    """Truncate sequences, and remove the blocks that they no longer need from their tables.

    `lengths[b] = n = max(0, min(lengths[b], new_lengths[b]))`. The first `ceil(n / block_size)`
    entries of the table stay; those from there to `ceil(old / block_size)` become -1.

    Args:
        block_tables: [B, M] int32 or int64, any strides, changed in place.
        lengths: [B] int32 or int64, changed in place.
        new_lengths: [B] int32 or int64.
        block_size: slots in a block, at least 1.

    Returns:
        The entries that became -1, without those that were negative already.

    Raises:
        RuntimeError: a shape, dtype, device or value does not fit; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of a tensor.

    >>> tables, lengths = torch.tensor([[7, 3, 5, -1]], dtype=torch.int32), torch.tensor([9])
    >>> freed = paged_truncate_(tables, lengths, torch.tensor([4]), 4)
    >>> freed.blocks.tolist(), freed.num_freed.tolist()
    ([[3, 5, -1, -1]], [2])
    >>> tables, lengths
    (tensor([[ 7, -1, -1, -1]], dtype=torch.int32), tensor([4]))
    """
    conversion.require_tensors(block_tables=block_tables, lengths=lengths, new_lengths=new_lengths)
    conversion.require_integer(block_size, "block_size")
    freed = ops.paged_truncate_.default(block_tables, lengths, new_lengths, block_size)
    in_place.raise_versions([block_tables, lengths])
    return FreedBlocks(*freed)


@fake_kernel("paged_truncate_")
def _(
    block_tables: Tensor, lengths: Tensor, new_lengths: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    num_freed = block_tables.new_empty(lengths.shape, dtype=torch.int32)
    return block_tables.new_empty(block_tables.shape), num_freed
