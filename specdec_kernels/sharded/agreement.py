"""What the ranks tell each other before anything else: that they were called alike."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch
from torch import Tensor

from ..arguments.chain import ChainArguments
from ..arguments.checks import require
from .collectives import Collectives
from .distribution import Shard

# Arguments that every rank must be given alike, by the name of the public function.
REPLICATED = {
    "rule": ("rule",),
    "draft_token_ids": ("draft_token_ids",),
    "draft_shard": (
        "draft_ids", "draft_logsumexp", "draft_threshold", "draft_temperatures",
        "draft_temperature", "draft_bitmask",
    ),
    "temperature": ("temperatures", "temperature"),
    "top_k": ("top_ks", "top_k"),
    "top_p": ("top_ps", "top_p"),
    "min_p": ("min_ps", "min_p"),
    "token_bitmask": ("token_bitmask",),
    "seeds": ("seeds",),
    "positions": ("positions",),
    "target_indptr": ("target_indptr",),
    "uniforms": ("uniforms",),
    "eos_token_ids": ("eos_token_ids",),
    "max_new_tokens": ("max_new_tokens",),
    "with_logprobs": ("with_logprobs",),
    "with_accept_probs": ("with_accept_probs",),
}  # fmt: skip


def checksum(value: Any) -> int:
    """A checksum of a number, None, or a tensor with its shape and dtype."""
    if not isinstance(value, Tensor):
        return zlib.crc32(repr(value).encode())
    crc = zlib.crc32(repr((value.shape, value.dtype)).encode())
    data = value.detach().to("cpu").contiguous()
    size = data.numel() * data.element_size()
    return zlib.crc32(ctypes.string_at(data.data_ptr(), size), crc) if size else crc


def _checksums(a: ChainArguments) -> dict[str, int]:
    sums = {}
    for name, fields in REPLICATED.items():
        parts = [checksum(getattr(a, field)) for field in fields]
        if name == "draft_shard":  # its columns differ, its other dimensions do not
            sparse = a.draft_ids is not None
            described = None if a.draft is None else (a.draft.shape[:-1], a.draft.dtype)
            parts.append(checksum(a.draft if sparse else described))
        sums[name] = zlib.crc32(repr(parts).encode())
    sums["target_shard"] = checksum((a.target.shape[:-1], a.target.dtype, a.target.device.type))
    return sums


def agree(
    collectives: Collectives,
    a: ChainArguments | None,
    width: int,
    vocab_start: int | None,
    vocab_size: int | None,
) -> tuple[Shard, Tensor]:
    """This rank's shard, and [ranks] where each shard starts. Raises on all ranks or on none.

    a: None if this rank has failed already.
    width: how many entries of the vocabulary this rank holds.
    vocab_start: of this rank; None if the shards follow each other in the order of the ranks.
    vocab_size: the sum of the widths of the shards; None if it is not known.
    """

    def payload() -> Tensor:
        assert a is not None
        start = -1 if vocab_start is None else vocab_start
        sums = _checksums(a) | {"vocab_size": checksum(vocab_size)}
        return torch.tensor([width, start, *sums.values()])

    names = (*REPLICATED, "target_shard", "vocab_size")
    gathered = collectives.gather(payload, len(names) + 2)
    collectives.raise_failures()
    on_host = gathered.cpu()
    for name, column in zip(names, on_host[:, 2:].T, strict=True):
        others = (column != column[0]).nonzero()[:, 0].tolist()
        require(
            not others,
            f"{name} must be equal on all ranks, got another one than rank 0 on ranks {others}",
        )
    widths, starts = on_host[:, 0], on_host[:, 1]
    vocab, filled = int(widths.sum()), widths > 0
    require(
        vocab_size is None or vocab == vocab_size,
        f"the shards must hold vocab_size = {vocab_size} tokens together, got {widths.tolist()}",
    )
    require(vocab > 0, f"the shards must hold at least 1 token together, got {widths.tolist()}")
    require(vocab < 2**31, f"the vocabulary must be below 2**31, got {vocab}")
    if (starts[filled] == -1).all():
        starts = widths.cumsum(0) - widths
    # It does not matter where a shard without entries starts: it is put behind the vocabulary.
    starts = starts.where(filled, vocab)
    order = starts.argsort()
    follow = widths[order].cumsum(0) - widths[order]
    require(
        bool((starts[order] == follow).all()),
        "vocab_start must let the shards follow each other from 0 on, without gaps or overlaps: "
        f"got starts {starts.tolist()} of {widths.tolist()} tokens",
    )
    rank = collectives.rank
    assert a is not None  # or the ranks have raised
    collectives.use_device(a.target.device)
    shard = Shard(int(starts[rank]), max(int(widths[rank]), 1), vocab)
    return shard, starts.to(collectives.device)
