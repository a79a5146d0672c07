"""In-place maintenance of the KV cache, all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import _kv_checks


def kv_append_(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    """Write new entries into caches, each sequence at its own position.

    `caches[i][b, :, positions[b] + j, :] = entries[i][b, :, j, :]`. A slot outside [0, S) is
    dropped: left padding of p tokens is appended with position -p.

    Args:
        caches: tensors [B, H, S, D] (keys, values, of any layers; H, S, D may differ), any dtype;
            the last dimension contiguous, changed in place.
        entries: one tensor [B, H, n, D] for each cache, of its dtype.
        positions: [B] int64, the slot of the first entry.

    Raises:
        RuntimeError: a shape, dtype or device that does not fit, with its name and value.

    >>> cache, new = torch.zeros(1, 1, 3, 1), torch.ones(1, 1, 2, 1)
    >>> kv_append_([cache], [new], torch.tensor([1]))
    >>> cache.flatten()
    tensor([0., 1., 1.])
    """
    torch.ops.specdec_kernels.kv_append_.default(list(caches), list(entries), positions)


def kv_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, *, zero_fill: bool = False
) -> None:
    """Cut each sequence to a new length: `lengths[b] = max(0, min(lengths[b], new_lengths[b]))`.

    Args:
        caches: tensors [B, H, S, D]; touched only with zero_fill, and there only the slots
            from the new to the old length.
        lengths: [B] int64, changed in place.
        new_lengths: [B] int64.
        zero_fill: zero the dropped slots.

    Raises:
        RuntimeError: a shape, dtype or device that does not fit, with its name and value.

    >>> lengths = torch.tensor([4, 1])
    >>> kv_truncate_([], lengths, torch.tensor([2, 3]))
    >>> lengths
    tensor([2, 1])
    """
    torch.ops.specdec_kernels.kv_truncate_.default(list(caches), lengths, new_lengths, zero_fill)


def kv_compact_(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    """Move the accepted path of a token tree to the end of the committed prefix.

    The token in slot `base[b] + path[b, j]` moves to slot `base[b] + j`, in order; what is in place
    already is not touched, and slots behind the path keep what they hold. A path ends at the first
    entry that is negative or not larger than the one before it, or whose slot lies outside [0, S).

    Args:
        caches: tensors [B, H, S, D] (keys, values, scales, of any layers; H, S, D and the dtype may
            differ), any dtype; the last dimension contiguous, changed in place.
        base: [B] int64, the slot of node 0, the root of the tree.
        path: [B, P] int32 or int64, node ids in increasing order, then -1, as `verify_tree` returns
            them.

    Raises:
        RuntimeError: a shape, dtype or device that does not fit, with its name and value.

    >>> cache = torch.arange(6.0).view(1, 1, 6, 1)
    >>> kv_compact_([cache], torch.tensor([1]), torch.tensor([[0, 2, 4, -1]]))
    >>> cache.flatten()
    tensor([0., 1., 3., 5., 4., 5.])
    """
    torch.ops.specdec_kernels.kv_compact_.default(list(caches), base, path)


@torch.library.register_fake("specdec_kernels::kv_append_")
def _(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    _kv_checks.kv_append_(caches, entries, positions)


@torch.library.register_fake("specdec_kernels::kv_truncate_")
def _(caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, zero_fill: bool) -> None:
    _kv_checks.kv_truncate_(caches, lengths, new_lengths)


@torch.library.register_fake("specdec_kernels::kv_compact_")
def _(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    _kv_checks.kv_compact_(caches, base, path)
