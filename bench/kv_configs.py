"""Compaction of a cache along accepted paths: its point, its inputs and the bytes that move."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench.configs import DTYPES, SHORT


@dataclass(frozen=True)
class KvPoint:
    """A cache [B, heads, slots, head_dim] of keys and one of values in each layer.

    nodes: the tree whose keys and values stand behind the committed prefix. accepted: of them.
    """

    batch: int = 64
    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    nodes: int = 16
    accepted: int = 4
    slots: int = 512
    dtype: str = "bfloat16"

    @property
    def id(self) -> str:
        words = [f"B{self.batch}", f"L{self.layers}", f"H{self.heads}", f"S{self.slots}"]
        words.append(f"D{self.head_dim}")
        return "-".join([*words, f"{self.accepted}of{self.nodes}", SHORT[self.dtype]])

    @property
    def row(self) -> int:
        """Bytes of a token in one cache."""
        return self.heads * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def moved_bytes(self) -> int:
        return 2 * self.layers * self.batch * self.accepted * self.row

    @property
    def needed_bytes(self) -> int:
        return 2 * self.layers * self.batch * self.slots * self.row + 4 * self.moved_bytes

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, **asdict(self)}


@dataclass(frozen=True)
class KvInputs:
    """base [B] and path [B, nodes], int64. No accepted node is where it belongs: all move."""

    point: KvPoint
    caches: list[Tensor]
    base: Tensor
    path: Tensor


def build(point: KvPoint, device: str = "cpu") -> KvInputs:
    """The point's tensors; prefixes of different lengths, every sequence with a path of its own."""
    g = torch.Generator().manual_seed(0)
    path = torch.full((point.batch, point.nodes), -1)
    for row in path:
        # not node 0, or the first would be in place already
        chosen = 1 + torch.randperm(point.nodes - 1, generator=g)[: point.accepted]
        row[: point.accepted] = chosen.sort().values
    base = torch.randint(0, point.slots - point.nodes + 1, (point.batch,), generator=g)
    size = (point.batch, point.heads, point.slots, point.head_dim)
    caches = [
        torch.zeros(size, dtype=DTYPES[point.dtype], device=device) for _ in range(2 * point.layers)
    ]
    return KvInputs(point, caches, base.to(device), path.to(device))


def floor_bytes(point: KvPoint) -> float:
    """What moves is read and written."""
    return 2.0 * point.moved_bytes


def grid(device: str, *, quick: bool = False) -> list[KvPoint]:
    """One cache; on the CPU also a shorter one, of which more rows share a page."""
    del quick
    return [KvPoint()] if device == "cuda" else [KvPoint(slots=128), KvPoint()]
