"""Configs of ops that accept no drafts: `sample`, `kv_append_`, and the cases of the tests.

A config says which calls are timed beside each other: ours is "cpp", the others are eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import proofs
import torch
from torch import Tensor

from bench import eager
from bench.configs import COPIES, BaseConfig
from bench.peers.base import Peer, Unsupported
from specdec_kernels import kv_append_, sample

Calls = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class CallConfig(BaseConfig):
    """One setting of an op on the CPU.

    floor_bytes: what the op has to read, and for a cache to write.
    make: the calls by the names of peers.
    """

    name: str
    floor_bytes: float
    make: Callable[[], Calls]

    @property
    def id(self) -> str:
        return self.name

    @property
    def needed_bytes(self) -> float:
        return COPIES * self.floor_bytes

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id}


@dataclass(frozen=True)
class CallInputs:
    config: CallConfig
    calls: Calls


def build(config: CallConfig, device: str = "cpu") -> CallInputs:
    return CallInputs(config, config.make())


def _peer(name: str, inputs: CallInputs) -> Callable[[], Any]:
    if name not in inputs.calls:
        raise Unsupported("takes a top-k")
    return inputs.calls[name]


# Nothing is accepted, which `mean_accepted` says as 0.
PEERS = tuple(
    Peer(
        name, lambda device: "" if device == "cpu" else "runs on cpu", partial(_peer, name),
        lambda result: torch.zeros(1), ours=name == "cpp",
    )
    for name in ("cpp", "eager", "eager-topk")
)  # fmt: skip


def sample_grid(device: str, *, quick: bool = False) -> list[CallConfig]:
    """Against `torch.softmax` and `torch.multinomial` on the same logits."""
    filters: dict[str, dict[str, Any]] = {
        "off": {},
        "gumbel": {"method": "gumbel"},
        "t.8-k50-p.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    }
    return [
        CallConfig(f"B{rows}-V{v}-f32-{name}", rows * v * 4, partial(_samples, rows, v, options))
        for name, options in filters.items()
        for rows, v in ((1, 49152), (8, 49152), (8, 128256))
    ]


def _samples(rows: int, vocabulary: int, options: dict[str, Any]) -> Calls:
    logits = proofs.zipf_logits(rows, vocabulary, torch.Generator().manual_seed(0))
    noise = {"seeds": torch.arange(rows), "positions": torch.zeros(rows, dtype=torch.int64)}
    filters = {name: value for name, value in options.items() if name != "method"}
    calls: dict[str, Callable[[], Any]] = {
        "cpp": lambda: sample(logits, **noise, **options),
        "eager": lambda: eager.sample(logits, **filters),
    }
    if "top_k" in filters:
        calls["eager-topk"] = lambda: eager.sample_candidates(logits, **filters)
    return calls


def append_grid(device: str, *, quick: bool = False) -> list[CallConfig]:
    """A round and a prefill over caches of real models: layers, B, heads, head_dim, new tokens."""
    shapes = {
        "SmolLM2-135M-B1": (30, 1, 3, 64, 6),
        "SmolLM2-135M-B8": (30, 8, 3, 64, 6),
        "Llama-8B-layers4-B8": (4, 8, 8, 128, 6),
        "SmolLM2-135M-B2-prefill512": (30, 2, 3, 64, 512),
    }
    return [
        CallConfig(
            f"{name}-{short}", 4 * layers * b * heads * new * d * dtype.itemsize,
            partial(_appends, layers, (b, heads, 1024, d), new, dtype),
        )
        for name, (layers, b, heads, d, new) in shapes.items()
        for dtype, short in ((torch.float32, "f32"), (torch.bfloat16, "bf16"))
    ]  # fmt: skip


def _appends(layers: int, size: tuple[int, int, int, int], new: int, dtype: torch.dtype) -> Calls:
    b, heads, _, d = size
    caches = [torch.zeros(size, dtype=dtype) for _ in range(2 * layers)]
    # As projections return them: [B, new, heads, head_dim] transposed.
    entries = [torch.randn(b, new, heads, d).to(dtype).transpose(1, 2) for _ in caches]
    positions = torch.arange(b) * 7 + 100
    expected = [cache.clone() for cache in caches]
    kv_append_(caches, entries, positions)
    eager_append(expected, entries, positions)
    assert all(map(torch.equal, caches, expected))
    return {
        "cpp": lambda: kv_append_(caches, entries, positions),
        "eager": lambda: eager_append(caches, entries, positions),
    }


def eager_append(caches: list[Tensor], entries: list[Tensor], positions: Tensor) -> None:
    """Write the entries as a static cache does, at each sequence's own position."""
    slots = positions[:, None] + torch.arange(entries[0].shape[2])
    sequences = torch.arange(len(positions))[:, None]
    for cache, new in zip(caches, entries, strict=True):
        cache.transpose(1, 2).index_put_((sequences, slots), new.transpose(1, 2))


def case_grid(device: str, *, quick: bool = False) -> list[CallConfig]:
    """The inputs that correctness is tested with: every rule, draft and filter.

    Their floor counts all rows as float32, and is no bound.
    """
    return [
        CallConfig(f"{case.op}-{case}", 4 * case.rows * case.vocabulary or 1, partial(_case, case))
        for op in ("sample", "verify_chain", "verify_tree")
        for case in proofs.cases(op, heavy=True)
    ]


def _case(case: proofs.Case) -> Calls:
    args = case.args()
    return {"cpp": lambda: proofs.providers(case.op)["cpp"](*args)}
