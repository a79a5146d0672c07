"""Two baselines of compaction: one copy of as many bytes, and indexing layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.configs import DTYPES
from bench.kv_configs import KvInputs
from bench.peers.base import Peer


def _all(inputs: KvInputs) -> torch.Tensor:
    return torch.full((inputs.config.batch,), inputs.config.accepted)


def build(inputs: KvInputs) -> Callable[[], Any]:
    dtype = DTYPES[inputs.config.dtype]
    source = torch.ones(
        inputs.config.moved_bytes // dtype.itemsize, dtype=dtype, device=inputs.base.device
    )
    copy, accepted = torch.empty_like(source), _all(inputs)

    def once() -> Any:
        copy.copy_(source)
        return accepted

    return once


def build_eager(inputs: KvInputs) -> Callable[[], Any]:
    """Gather the accepted slots of each layer and scatter them to their new places."""
    config, accepted = inputs.config, _all(inputs)
    sequences = torch.arange(config.batch, device=inputs.base.device)[:, None]
    kept = inputs.path[:, : config.accepted]

    def once() -> Any:
        source = inputs.base[:, None] + kept
        slots = inputs.base[:, None] + torch.arange(config.accepted, device=sequences.device)
        for cache in inputs.caches:
            by_slot = cache.transpose(1, 2)
            by_slot[sequences, slots] = by_slot[sequences, source]
        return accepted

    return once


PEERS = (
    Peer("copy", lambda device: "", build, accepted=lambda accepted: accepted),
    Peer("eager", lambda device: "", build_eager, accepted=lambda accepted: accepted),
)
