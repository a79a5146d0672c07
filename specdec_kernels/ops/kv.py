"""In-place changes of KV caches [B, H, S, D], all layers in one launch.

A *slot* is one token's place in a cache: `cache[b, :, s, :]` is slot s of sequence b, in all heads.
`lengths[b]` counts the tokens of sequence b in the cache. None of these ops makes the host wait for
the device. They move bytes, so the dtype of a cache does not matter.

No op is differentiable. Each raises the version counter of the tensors it writes, and raises
RuntimeError if one of them is a leaf that requires a gradient, is expanded, or overlaps another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion, in_place
from ..arguments.checks import IDS, check_same_device, dtype_name, shape
from ..arguments.validation import fake_kernel
from ..arguments.values import require_flag


def kv_append_(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    """Write new entries into caches, for each sequence from its own position on.

    `caches[i][b, :, positions[b] + j, :] = entries[i][b, :, j, :]`. Entries whose slot would lie
    outside [0, S) are dropped, so a prompt with p tokens of left padding is appended at position
    -p.

    Args:
        caches: tensors [B, H, S, D] of any dtype, changed in place: keys and values of any layers,
            whose H, S and D may differ. The last dimension must be contiguous.
        entries: one tensor [B, H, n, D] for each cache, of the same dtype. Entries that lie in a
            cache are read before anything is written.
        positions: [B] int32 or int64, the slot of the first entry.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names it.
        TypeError: an argument is not a tensor, or not a list of tensors.

    >>> cache, new = torch.zeros(1, 1, 3, 1), torch.ones(1, 1, 2, 1)
    >>> kv_append_([cache], [new], torch.tensor([1]))
    >>> cache.flatten()
    tensor([0., 1., 1.])
    """
    conversion.require_tensors(positions=positions)
    caches = conversion.require_tensor_list(caches, "caches")
    entries = conversion.require_tensor_list(entries, "entries")
    in_place.check_leaves(caches, "caches")
    ops.kv_append_.default(caches, entries, positions)
    in_place.raise_versions(caches)


@fake_kernel("kv_append_")
def _(caches: Sequence[Tensor], entries: Sequence[Tensor], positions: Tensor) -> None:
    """Nothing is returned."""


def kv_truncate_(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, *, zero_fill: bool = False
) -> None:
    """Truncate sequences: `lengths[b] = max(0, min(lengths[b], new_lengths[b]))`.

    Dropped slots keep their content, because the next append overwrites it, unless `zero_fill` asks
    for zeros.

    Args:
        caches: tensors [B, H, S, D]; changed only with zero_fill.
        lengths: [B] int32 or int64, changed in place.
        new_lengths: [B] int32 or int64.
        zero_fill: whether to zero the slots from the new to the old length.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names it.
        TypeError: an argument has a wrong type, such as a tensor in place of a list of tensors.

    >>> lengths = torch.tensor([4, 1])
    >>> kv_truncate_([], lengths, torch.tensor([2, 3]))
    >>> lengths
    tensor([2, 1])
    """
    conversion.require_tensors(lengths=lengths, new_lengths=new_lengths)
    require_flag(zero_fill, "zero_fill")
    caches = conversion.require_tensor_list(caches, "caches")
    written = caches if zero_fill else []
    in_place.check_leaves(written, "caches")
    ops.kv_truncate_.default(caches, lengths, new_lengths, zero_fill)
    in_place.raise_versions([*written, lengths])


@fake_kernel("kv_truncate_")
def _(caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, zero_fill: bool) -> None:
    """Nothing is returned."""


def kv_compact_(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    """Move the accepted path of a token tree to the end of the committed prefix.

    For j = 0, 1, ... the token in slot `base[b] + path[b, j]` moves to slot `base[b] + j`. A token
    that is in place already is not written, and slots after the path keep their content. The path
    of a sequence ends at the first `path[b, j] < j`, which no tree with parents before their
    children has and -1 always is, or at the first slot outside [0, S).

    Args:
        caches: tensors [B, H, S, D] of any dtype, changed in place: keys, values and scales of any
            layers, whose H, S, D and dtype may differ. The last dimension must be contiguous.
        base: [B] int32 or int64, the slot of node 0. In a tree of `verify_tree` the root, the
            pending token, comes before it, so that this is the root's slot + 1.
        path: [B, P] int32 or int64, node ids from the root downwards, then -1, as `verify_tree`
            returns them.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names it.
        TypeError: an argument is not a tensor, or not a list of tensors.

    >>> cache = torch.arange(6.0).view(1, 1, 6, 1)
    >>> kv_compact_([cache], torch.tensor([1]), torch.tensor([[0, 2, 4, -1]]))
    >>> cache.flatten()
    tensor([0., 1., 3., 5., 4., 5.])
    """
    conversion.require_tensors(base=base, path=path)
    caches = conversion.require_tensor_list(caches, "caches")
    in_place.check_leaves(caches, "caches")
    ops.kv_compact_.default(caches, base, path)
    in_place.raise_versions(caches)


@fake_kernel("kv_compact_")
def _(caches: Sequence[Tensor], base: Tensor, path: Tensor) -> None:
    """Nothing is returned."""


def kv_realign_(
    caches: Sequence[Tensor],
    starts: Tensor,
    lengths: Tensor,
    shifts: Tensor,
    *,
    zero_fill: bool = False,
) -> None:
    """Move the tokens of each sequence to the right or to the left, for left-padded batches.

    The tokens in slots [starts[b], starts[b] + lengths[b]) move by `shifts[b]`; the ranges before
    and after may overlap. A token whose old or new slot lies outside [0, S) does not move.

    Args:
        caches: tensors [B, H, S, D] of any dtype, changed in place; H, S, D and the dtype may
            differ. The last dimension must be contiguous.
        starts: [B] int32 or int64, the slot of the first token.
        lengths: [B] int32 or int64, how many tokens; none if negative.
        shifts: [B] int32 or int64, to the right if positive.
        zero_fill: whether to zero the slots of the old range to which no token moved. Otherwise
            they keep their content.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names it.
        TypeError: an argument has a wrong type, such as a tensor in place of a list of tensors.

    >>> cache = torch.arange(5.0).view(1, 1, 5, 1)
    >>> where = torch.tensor([1]), torch.tensor([3]), torch.tensor([1])
    >>> kv_realign_([cache], *where, zero_fill=True)
    >>> cache.flatten()
    tensor([0., 0., 1., 2., 3.])
    """
    conversion.require_tensors(starts=starts, lengths=lengths, shifts=shifts)
    require_flag(zero_fill, "zero_fill")
    caches = conversion.require_tensor_list(caches, "caches")
    in_place.check_leaves(caches, "caches")
    ops.kv_realign_.default(caches, starts, lengths, shifts, zero_fill)
    in_place.raise_versions(caches)


@fake_kernel("kv_realign_")
def _(
    caches: Sequence[Tensor], starts: Tensor, lengths: Tensor, shifts: Tensor, zero_fill: bool
) -> None:
    """Nothing is returned."""


def ring_truncate_(
    caches: Sequence[Tensor],
    lengths: Tensor,
    new_lengths: Tensor,
    window: int,
    *,
    zero_fill: bool = False,
) -> Tensor:
    """Truncate sequences in a ring buffer, the cache of sliding-window attention.

    Token t is kept in slot `t % S`, where it overwrote token `t - S`. As in `kv_truncate_`,
    `lengths[b] = max(0, min(lengths[b], new_lengths[b]))`. A dropped token may have overwritten one
    that the window before the new length needs; that cannot be undone, so the op reports it.

    Args:
        caches: tensors [B, H, S, D] of any dtype; H, S, D and the dtype may differ. The last
            dimension must be contiguous. Changed only with zero_fill.
        lengths: [B] int32 or int64, tokens written so far, changed in place.
        new_lengths: [B] int32 or int64.
        window: how many of the last kept tokens will be attended to, in [1, S].
        zero_fill: whether to zero the slots of the dropped tokens.

    Returns:
        status [B] int32: 1 where a dropped token overwrote one of that window, so that the sequence
        must be computed again; otherwise 0, and 0 without caches. If S >= window + n, dropping n
        tokens never overwrites one.

    Raises:
        RuntimeError: a shape, dtype, device or value does not fit; the message names it.
        TypeError: an argument has a wrong type, such as a tensor in place of a list of tensors.

    >>> cache, lengths = torch.tensor([4.0, 5, 2, 3]).view(1, 1, 4, 1), torch.tensor([6])
    >>> ring_truncate_([cache], lengths, torch.tensor([5]), 3, zero_fill=True)
    tensor([0], dtype=torch.int32)
    >>> cache.flatten(), lengths
    (tensor([4., 0., 2., 3.]), tensor([5]))
    """
    conversion.require_tensors(lengths=lengths, new_lengths=new_lengths)
    conversion.require_integer(window, "window")
    require_flag(zero_fill, "zero_fill")
    caches = conversion.require_tensor_list(caches, "caches")
    written = caches if zero_fill else []
    in_place.check_leaves(written, "caches")
    status: Tensor = ops.ring_truncate_.default(caches, lengths, new_lengths, window, zero_fill)
    in_place.raise_versions([*written, lengths])
    return status


@fake_kernel("ring_truncate_")
def _(
    caches: Sequence[Tensor], lengths: Tensor, new_lengths: Tensor, window: int, zero_fill: bool
) -> Tensor:
    return lengths.new_empty(lengths.shape, dtype=torch.int32)


def state_select_(states: Sequence[Tensor], index: Tensor) -> None:
    """Restore recurrent states: for each sequence, copy the state `index[b]` to place 0.

    For target models with recurrent layers. Their forward stores the state after each drafted
    token, and the next one continues from the state after the last accepted token. Where the index
    is not in [0, S), nothing is copied.

    Args:
        states: tensors [B, S, ...] of any dtype, changed in place; S, the trailing dimensions and
            the dtype may differ. The trailing dimensions must be contiguous among themselves.
        index: [B] int32 or int64, which of the S stored states.

    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit; the message names it.
        TypeError: an argument is not a tensor, or not a list of tensors.

    >>> states = torch.arange(6.0).view(2, 3, 1)
    >>> state_select_([states], torch.tensor([2, 0]))
    >>> states.flatten()
    tensor([2., 1., 2., 3., 4., 5.])
    """
    conversion.require_tensor(index, "index")
    states = conversion.require_tensor_list(states, "states")
    in_place.check_leaves(states, "states")
    _check_states(states, index)
    rows = [t.view(*t.shape[:2], math.prod(t.shape[2:]))[:, None] for t in states]
    base = torch.zeros(index.shape, dtype=torch.int64, device=index.device)
    kv_compact_(rows, base, index[:, None])


def _check_states(states: Sequence[Tensor], index: Tensor) -> None:
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
