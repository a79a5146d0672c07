"""In-place maintenance of paged KV caches, all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments import conversion as _params
from specdec_kernels.arguments import kv as _kv_checks


class FreedBlocks(NamedTuple):
    """Blocks that `paged_truncate_` took from the tables.

    blocks: [B, M] int32, the freed blocks of each sequence in the order of its table, then -1.
    num_freed: [B] int32, how many.
    """

    blocks: Tensor
    num_freed: Tensor


def paged_compact_(
    caches: Sequence[Tensor], block_tables: Tensor, base: Tensor, path: Tensor
) -> None:
    """Move the accepted path of a token tree to the end of the committed prefix, through blocks.

    As `kv_compact_`, where slot s of sequence b is slot `s % block_size` of block
    `block_tables[b, s // block_size]`. A slot beyond the table, or whose block lies outside
    [0, num_blocks), ends the path. No block may stand twice in the slots that move, be it in one
    sequence or in two: blocks that sequences share belong to the prefix, not to the tree.

    Args:
        caches: tensors [num_blocks, block_size, H, D] (H, D and the dtype may differ), any dtype
            and strides, so that [num_blocks, H, block_size, D] is a transposed view; the last
            dimension contiguous, changed in place.
        block_tables: [B, M] int32.
        base: [B] int64, the slot of node 0, as of `kv_compact_`.
        path: [B, P] int32 or int64, node ids from the root on, then -1, as `verify_tree` returns
            them.

    Raises:
        RuntimeError: a shape, dtype or device that does not fit, with its name and value.
        ValueError: an argument that is no tensor or no list of them.

    >>> cache = torch.arange(6.0).view(3, 2, 1, 1)
    >>> tables = torch.tensor([[2, 0]], dtype=torch.int32)
    >>> paged_compact_([cache], tables, torch.tensor([0]), torch.tensor([[0, 3, -1]]))
    >>> cache.flatten()
    tensor([0., 1., 2., 3., 4., 1.])
    """
    _params.tensors(block_tables=block_tables, base=base, path=path)
    torch.ops.specdec_kernels.paged_compact_.default(
        _params.listed(caches, "caches"), block_tables, base, path
    )


def paged_truncate_(
    block_tables: Tensor, lengths: Tensor, new_lengths: Tensor, block_size: int
) -> FreedBlocks:
    """Cut each sequence to a new length and take the blocks it needs no more from its table.

    `lengths[b] = n = max(0, min(lengths[b], new_lengths[b]))`; the first `ceil(n / block_size)`
    entries of the table stay, those from there to `ceil(old / block_size)` become -1.

    Args:
        block_tables: [B, M] int32, any strides, changed in place.
        lengths: [B] int64, changed in place.
        new_lengths: [B] int64.
        block_size: tokens a block, at least 1.

    Returns:
        What left the table, negative entries left out.

    Raises:
        RuntimeError: a shape, dtype, device or value that does not fit, with its name and value.
        ValueError: an argument that is no tensor.

    >>> tables, lengths = torch.tensor([[7, 3, 5, -1]], dtype=torch.int32), torch.tensor([9])
    >>> freed = paged_truncate_(tables, lengths, torch.tensor([4]), 4)
    >>> freed.blocks.tolist(), freed.num_freed.tolist()
    ([[3, 5, -1, -1]], [2])
    >>> tables, lengths
    (tensor([[ 7, -1, -1, -1]], dtype=torch.int32), tensor([4]))
    """
    _params.tensors(block_tables=block_tables, lengths=lengths, new_lengths=new_lengths)
    return FreedBlocks(
        *torch.ops.specdec_kernels.paged_truncate_.default(
            block_tables, lengths, new_lengths, block_size
        )
    )


@torch.library.register_fake("specdec_kernels::paged_compact_")
def _(caches: Sequence[Tensor], block_tables: Tensor, base: Tensor, path: Tensor) -> None:
    _kv_checks.paged_compact_(caches, block_tables, base, path)


@torch.library.register_fake("specdec_kernels::paged_truncate_")
def _(
    block_tables: Tensor, lengths: Tensor, new_lengths: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    _kv_checks.paged_truncate_(block_tables, lengths, new_lengths, block_size)
    return block_tables.new_empty(block_tables.shape), block_tables.new_empty(lengths.shape)
