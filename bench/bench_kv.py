"""Times the cache ops on caches of real models against eager PyTorch, which goes layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from bench import kv_configs
from bench.kv_configs import KvConfig
from bench.peers import kv_copy
from specdec_kernels import kv_append_, kv_compact_, kv_truncate_, paged_append_


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's cache: keys and values of each layer are [B, heads, slots, head_dim]."""

    id: str
    layers: int
    batch: int
    heads: int
    slots: int
    head_dim: int
    new: int

    def heads_of_all_caches(self) -> int:
        return 2 * self.layers * self.batch * self.heads

    def caches(self, dtype: torch.dtype) -> list[torch.Tensor]:
        size = (self.batch, self.heads, self.slots, self.head_dim)
        return [torch.zeros(size, dtype=dtype) for _ in range(2 * self.layers)]

    def entries(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """New keys and values as projections return them: [B, new, heads, head_dim] transposed."""
        size = (self.batch, self.new, self.heads, self.head_dim)
        return [torch.randn(size).to(dtype).transpose(1, 2) for _ in range(2 * self.layers)]


ROUND = (
    Shape("SmolLM2-135M-B1", 30, 1, 3, 1024, 64, 6),
    Shape("SmolLM2-135M-B8", 30, 8, 3, 1024, 64, 6),
    Shape("Llama-8B-layers4-B8", 4, 8, 8, 1024, 128, 6),
)
TREES = (KvConfig(batch=8, layers=30, heads=3, head_dim=64, slots=1024), KvConfig(slots=128))
PREFILL = (Shape("SmolLM2-135M-B2-prefill512", 30, 2, 3, 1024, 64, 512),)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def eager_append(caches, entries, positions):
    """Write the entries as a static cache does, at each sequence's own position."""
    n = entries[0].shape[2]
    slots = positions[:, None] + torch.arange(n, device=positions.device)
    sequences = torch.arange(len(positions), device=positions.device)[:, None]
    for cache, new in zip(caches, entries, strict=True):
        cache.transpose(1, 2).index_put_((sequences, slots), new.transpose(1, 2))


def eager_truncate(caches, lengths, new_lengths):
    """Zero the dropped slots of every cache and store the new lengths."""
    old = lengths.clone()
    lengths.copy_(torch.minimum(lengths, new_lengths).clamp(min=0))
    slot = torch.arange(caches[0].shape[2], device=lengths.device)
    dropped = (slot >= lengths[:, None]) & (slot < old[:, None])
    where = dropped.nonzero(as_tuple=True)
    for cache in caches:
        cache.transpose(1, 2).index_put_(where, torch.zeros((), dtype=cache.dtype))


@DTYPES
@pytest.mark.parametrize("shape", [*ROUND, *PREFILL], ids=lambda s: s.id)
def test_kv_append(compare, shape, dtype):
    caches, entries = shape.caches(dtype), shape.entries(dtype)
    positions = torch.arange(shape.batch) * 7 + 100
    want = [c.clone() for c in caches]
    kv_append_(caches, entries, positions)
    eager_append(want, entries, positions)
    assert all(map(torch.equal, caches, want))
    compare(
        lambda: kv_append_(caches, entries, positions),
        {"eager": lambda: eager_append(caches, entries, positions)},
        floor=2 * shape.heads_of_all_caches() * shape.new * shape.head_dim * dtype.itemsize,
    )


def eager_paged_append(caches, entries, block_tables, positions):
    """Write the entries through the block tables, layer by layer."""
    n, size = entries[0].shape[1], caches[0].shape[1]
    slots = positions[:, None] + torch.arange(n, device=positions.device)
    blocks = block_tables.gather(1, slots // size)
    for cache, new in zip(caches, entries, strict=True):
        cache.index_put_((blocks, slots % size), new)


@DTYPES
@pytest.mark.parametrize("shape", [*ROUND, *PREFILL], ids=lambda s: s.id)
def test_paged_append(compare, shape, dtype):
    """Blocks of 16 slots, in random order, as after some time of serving."""
    size, per_sequence = 16, shape.slots // 16
    blocks = shape.batch * per_sequence
    pool = (blocks, size, shape.heads, shape.head_dim)
    caches = [torch.zeros(pool, dtype=dtype) for _ in range(2 * shape.layers)]
    entries = [new.transpose(1, 2) for new in shape.entries(dtype)]
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
    tables = order.view(shape.batch, per_sequence)
    positions = torch.arange(shape.batch) * 7 + 100
    want = [c.clone() for c in caches]
    paged_append_(caches, entries, tables, positions)
    eager_paged_append(want, entries, tables, positions)
    assert all(map(torch.equal, caches, want))
    compare(
        lambda: paged_append_(caches, entries, tables, positions),
        {"eager": lambda: eager_paged_append(caches, entries, tables, positions)},
        floor=2 * shape.heads_of_all_caches() * shape.new * shape.head_dim * dtype.itemsize,
    )


@DTYPES
@pytest.mark.parametrize("shape", ROUND, ids=lambda s: s.id)
def test_kv_truncate(compare, shape, dtype):
    """A round drops four slots of each sequence and zeroes them."""
    drop = 4
    caches = shape.caches(dtype)
    for cache in caches:
        cache.fill_(1)
    lengths = torch.arange(shape.batch) * 7 + 200
    new, start = lengths - drop, lengths.clone()
    want, cut = [c.clone() for c in caches], lengths.clone()
    kv_truncate_(caches, lengths, new, zero_fill=True)
    eager_truncate(want, cut, new)
    assert all(map(torch.equal, [*caches, lengths], [*want, cut]))

    def again(op, **options):
        lengths.copy_(start)
        op(caches, lengths, new, **options)

    compare(
        lambda: again(kv_truncate_, zero_fill=True),
        {"eager": lambda: again(eager_truncate)},
        floor=shape.heads_of_all_caches() * drop * shape.head_dim * dtype.itemsize,
    )


@pytest.mark.parametrize("config", TREES, ids=lambda p: p.id)
def test_kv_compact(compare, config):
    """Compaction should take at most twice as long as one copy of the bytes that it moves."""
    inputs = kv_configs.build(config)
    compare(
        lambda: kv_compact_(inputs.caches, inputs.base, inputs.path),
        {"copy": kv_copy.build(inputs), "eager": kv_copy.build_eager(inputs)},
        floor=kv_configs.floor_bytes(config),
    )
