"""Bitmasks of the whole vocabulary, of which a rank applies the bits of its shard.

See specdec_kernels/ops/verify_chain.py, `token_bitmask`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments.chain import ChainArguments
from ..arguments.checks import require
from ..arguments.status import Status
from .distribution import Shard
from .sequence import Sequences, take

_ALL = -1  # a word of set bits


def masked(a: ChainArguments, shard: Shard) -> ChainArguments:
    """The arguments with copies of the rows in which tokens not allowed are -inf."""
    if a.token_bitmask is not None:
        _check("token_bitmask", a.token_bitmask, a.target, shard.vocab)
        a = a._replace(target=_masked(a.target, a.token_bitmask, shard))
    if a.draft_bitmask is not None and a.draft is not None:
        _check("draft token_bitmask", a.draft_bitmask, a.draft, shard.vocab)
        a = a._replace(draft=_masked(a.draft, a.draft_bitmask, shard))
    return a


def name_faults(
    a: ChainArguments, shard: Shard, s: Sequences, num_accepted: Tensor, status: Tensor
) -> Tensor:
    """The status [B], where rows that are not valid because nothing is allowed are named so."""
    if a.token_bitmask is None:
        return status
    beyond = _ALL << shard.vocab % 32 if shard.vocab % 32 else 0  # bits beyond the vocabulary
    words = a.token_bitmask.clone()
    words[..., -1] &= ~beyond
    nothing = (words == 0).all(-1)
    if a.target_indptr is not None:
        nothing = nothing[s.rows] if len(nothing) else torch.zeros_like(s.rows, dtype=torch.bool)
    here = take(nothing, num_accepted) & s.verifiable & (status & Status.TARGET_INVALID != 0)
    return torch.where(here, status ^ (Status.TARGET_INVALID | Status.NOTHING_ALLOWED), status)


def _check(name: str, bitmask: Tensor, rows: Tensor, vocab: int) -> None:
    shape = [*rows.shape[:-1], -(-vocab // 32)]
    require(
        list(bitmask.shape) == shape and bitmask.dtype == torch.int32,
        f"{name} must be {shape} int32, one bit for each token of the whole vocabulary, got "
        f"{list(bitmask.shape)} {bitmask.dtype}",
    )
    require(
        bitmask.device == rows.device,
        f"{name} must be on the device of the rows, {rows.device}, got {bitmask.device}",
    )


def _masked(rows: Tensor, bitmask: Tensor, shard: Shard) -> Tensor:
    ids = torch.arange(rows.shape[-1], device=rows.device) + shard.start
    ids = ids.clamp(max=shard.vocab - 1)  # of a rank without entries, whose column is -inf
    bits = bitmask[..., ids // 32] >> (ids % 32) & 1
    return rows.masked_fill(bits == 0, -torch.inf)
