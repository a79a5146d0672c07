"""In-place maintenance of the KV cache, all layers in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.arguments import conversion as _params
from specdec_kernels.arguments import kv as _kv_checks


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
        ValueError: an argument that is no tensor or no list of them.

    >>> cache, new = torch.zeros(1, 1, 3, 1), torch.ones(1, 1, 2, 1)
    >>> kv_append_([cache], [new], torch.tensor([1]))
    >>> cache.flatten()
    tensor([0., 1., 1.])
    """
    _params.tensors(positions=positions)
    torch.ops.specdec_kernels.kv_append_.default(
        _params.listed(caches, "caches"), _params.listed(entries, "entries"), positions
    )


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
        ValueError: an argument that is no tensor or no list of them.

    >>> lengths = torch.tensor([4, 1])
    >>> kv_truncate_([], lengths, torch.tensor([2, 3]))
    >>> lengths
    tensor([2, 1])
    """
    _params.tensors(lengths=lengths, new_lengths=new_lengths)
    torch.ops.specdec_kernels.kv_truncate_.default(
        _params.listed(caches, "caches"), lengths, new_lengths, zero_fill
    )


def kv_compact_(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    """Move the accepted path of a token tree to the end of the committed prefix.

    The token in slot `base[b] + path[b, j]` moves to slot `base[b] + j`, in order; what is in place
    already is not touched, and slots behind the path keep what they hold. A path ends at the first
    entry j that is less than j, for j nodes stand above it, or whose slot lies outside [0, S).

    Args:
        caches: tensors [B, H, S, D] (keys, values, scales, of any layers; H, S, D and the dtype may
            differ), any dtype; the last dimension contiguous, changed in place.
        base: [B] int64, the slot of node 0. Of a tree below a pending token, as `verify_tree` has
            it, that is the slot behind this token's.
        path: [B, P] int32 or int64, node ids from the root on, then -1, as `verify_tree` returns
            them.

    Raises:
        RuntimeError: a shape, dtype or device that does not fit, with its name and value.
        ValueError: an argument that is no tensor or no list of them.

    >>> cache = torch.arange(6.0).view(1, 1, 6, 1)
    >>> kv_compact_([cache], torch.tensor([1]), torch.tensor([[0, 2, 4, -1]]))
    >>> cache.flatten()
    tensor([0., 1., 3., 5., 4., 5.])
    """
    _params.tensors(base=base, path=path)
    torch.ops.specdec_kernels.kv_compact_.default(_params.listed(caches, "caches"), base, path)


def kv_realign_(
    caches: Sequence[Tensor],
    starts: Tensor,
    lengths: Tensor,
    shifts: Tensor,
    *,
    zero_fill: bool = False,
) -> None:
    """Move the tokens of each sequence to the right or left, as left-padded batches need.

    The tokens in slots [starts[b], starts[b] + lengths[b]) move by `shifts[b]`; the ranges before
    and after may overlap. A token whose old or new slot lies outside [0, S) does not move.

    Args:
        caches: tensors [B, H, S, D] (H, S, D and the dtype may differ), any dtype; the last
            dimension contiguous, changed in place.
        starts: [B] int64, the slot of the first token.
        lengths: [B] int64, how many tokens; none if negative.
        shifts: [B] int64, to the right if positive.
        zero_fill: zero the slots of the old range to which no token moved; else they keep what
            they hold.

    Raises:
        RuntimeError: a shape, dtype or device that does not fit, with its name and value.
        ValueError: an argument that is no tensor or no list of them.

    >>> cache = torch.arange(5.0).view(1, 1, 5, 1)
    >>> where = torch.tensor([1]), torch.tensor([3]), torch.tensor([1])
    >>> kv_realign_([cache], *where, zero_fill=True)
    >>> cache.flatten()
    tensor([0., 0., 1., 2., 3.])
    """
    _params.tensors(starts=starts, lengths=lengths, shifts=shifts)
    torch.ops.specdec_kernels.kv_realign_.default(
        _params.listed(caches, "caches"), starts, lengths, shifts, zero_fill
    )


def ring_truncate_(
    caches: Sequence[Tensor],
    lengths: Tensor,
    new_lengths: Tensor,
    window: int,
    *,
    zero_fill: bool = False,
) -> Tensor:
    """Cut each sequence of a sliding-window cache to a new length.

    Token t lives in slot `t % S`, which it took from token `t - S`. As `kv_truncate_` does,
    `lengths[b] = max(0, min(lengths[b], new_lengths[b]))`.

    Args:
        caches: tensors [B, H, S, D] (H, S, D and the dtype may differ), any dtype; the last
            dimension contiguous. Touched only with zero_fill, and there only the slots of dropped
            tokens.
        lengths: [B] int64, tokens written so far, changed in place.
        new_lengths: [B] int64.
        window: how many of the last kept tokens are to be attended, at least 1 and at most S.
        zero_fill: zero the slots of the dropped tokens.

    Returns:
        status [B] int32: 1 where a token of that window has lost its slot to a dropped one, and
        the sequence must be computed again; else 0, as without caches. At S >= window + n, n
        dropped tokens never do.

    Raises:
        RuntimeError: a shape, dtype, device or value that does not fit, with its name and value.
        ValueError: an argument that is no tensor or no list of them.

    >>> cache, lengths = torch.tensor([4.0, 5, 2, 3]).view(1, 1, 4, 1), torch.tensor([6])
    >>> ring_truncate_([cache], lengths, torch.tensor([5]), 3, zero_fill=True)
    tensor([0], dtype=torch.int32)
    >>> cache.flatten(), lengths
    (tensor([4., 0., 2., 3.]), tensor([5]))
    """
    _params.tensors(lengths=lengths, new_lengths=new_lengths)
    status: Tensor = torch.ops.specdec_kernels.ring_truncate_.default(
        _params.listed(caches, "caches"), lengths, new_lengths, window, zero_fill
    )
    return status


def state_select_(states: Sequence[Tensor], index: Tensor) -> None:
    """Take a recurrent state of each sequence: slot `index[b]` is copied to slot 0.

    A verifier that keeps the state after each drafted token goes on from that of the last
    accepted one. Where the index is not in [0, S), nothing moves.

    Args:
        states: tensors [B, S, ...] (S, the rest and the dtype may differ), any dtype; the trailing
            dimensions contiguous among themselves, changed in place.
        index: [B] int32 or int64.

    Raises:
        RuntimeError: a shape, dtype, stride or device that does not fit, with its name and value.
        ValueError: an argument that is no tensor or no list of them.

    >>> states = torch.arange(6.0).view(2, 3, 1)
    >>> state_select_([states], torch.tensor([2, 0]))
    >>> states.flatten()
    tensor([2., 1., 2., 3., 4., 5.])
    """
    _params.tensor(index, "index")
    states = _params.listed(states, "states")
    _kv_checks.state_select_(states, index)
    rows = [t.view(*t.shape[:2], math.prod(t.shape[2:]))[:, None] for t in states]
    base = torch.zeros(index.shape, dtype=torch.int64, device=index.device)
    kv_compact_(rows, base, index[:, None])


@torch.library.register_fake("specdec_kernels::kv_append_")
def _(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    _kv_checks.kv_append_(caches, entries, positions)


@torch.library.register_fake("specdec_kernels::kv_truncate_")
def _(caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, zero_fill: bool) -> None:
    _kv_checks.kv_truncate_(caches, lengths, new_lengths)


@torch.library.register_fake("specdec_kernels::kv_compact_")
def _(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    _kv_checks.kv_compact_(caches, base, path)


@torch.library.register_fake("specdec_kernels::kv_realign_")
def _(
    caches: Sequence[Tensor], starts: Tensor, lengths: Tensor, shifts: Tensor, zero_fill: bool
) -> None:
    _kv_checks.kv_realign_(caches, starts, lengths, shifts)


@torch.library.register_fake("specdec_kernels::ring_truncate_")
def _(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, window: int, zero_fill: bool
) -> Tensor:
    _kv_checks.ring_truncate_(caches, lengths, new_lengths, window)
    return lengths.new_empty(lengths.shape, dtype=torch.int32)
