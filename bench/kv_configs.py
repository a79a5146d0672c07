"""Configs of `kv_compact_`: the grid, the inputs of a config, and the bytes that it moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.configs import DTYPES, SHORT, BaseConfig


@dataclass(frozen=True)
class KvConfig(BaseConfig):
    """One setting of `kv_compact_`: keys and values of each layer are [B, heads, slots, head_dim].

    nodes: the size of the tree whose keys and values follow the committed prefix.
    accepted: the number of nodes on the accepted path.
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
    def token_bytes(self) -> int:
        """Bytes of one token in one cache."""
        return self.heads * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def moved_bytes(self) -> int:
        return 2 * self.layers * self.batch * self.accepted * self.token_bytes

    @property
    def needed_bytes(self) -> int:
        return 2 * self.layers * self.batch * self.slots * self.token_bytes + 4 * self.moved_bytes


@dataclass(frozen=True)
class KvInputs:
    """Arguments of `kv_compact_`; base [B] and path [B, nodes] are int64. Every path node moves."""

    config: KvConfig
    caches: list[Tensor]
    base: Tensor
    path: Tensor


def build(config: KvConfig, device: str = "cpu") -> KvInputs:
    """The inputs of a config. Every sequence has its own prefix length and its own path."""
    g = torch.Generator().manual_seed(0)
    path = torch.full((config.batch, config.nodes), -1)
    for nodes in path:
        # Node 0 is left out, because it is in its place already.
        chosen = 1 + torch.randperm(config.nodes - 1, generator=g)[: config.accepted]
        nodes[: config.accepted] = chosen.sort().values
    base = torch.randint(0, config.slots - config.nodes + 1, (config.batch,), generator=g)
    size = (config.batch, config.heads, config.slots, config.head_dim)
    dtype = DTYPES[config.dtype]
    caches = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2 * config.layers)]
    return KvInputs(config, caches, base.to(device), path.to(device))


def floor_bytes(config: KvConfig) -> float:
    """Bytes that are read and written to move the path's tokens."""
    return 2.0 * config.moved_bytes


def grid(device: str, *, quick: bool = False) -> list[KvConfig]:
    """One cache, and on the CPU a shorter one, where several heads share a page."""
    del quick
    return [KvConfig()] if device == "cuda" else [KvConfig(slots=128), KvConfig()]
