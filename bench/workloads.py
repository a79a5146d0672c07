"""The ops that the sweep can time, each with its grid, its peers and its byte floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from bench import call_configs, configs, kv_configs, tree_configs
from bench.peers import KV_PEERS, PEERS, TREE_PEERS, Peer


class Cost(NamedTuple):
    """Bytes of a call, the mean over turns.

    floor: bytes that this algorithm has to read, and for a cache to write.
    read: bytes that this project's kernels read.
    """

    floor: float
    read: float


@dataclass(frozen=True)
class Workload:
    """One op of the sweep.

    grid: (device, quick) -> configs.
    build: (config, device) -> inputs.
    cost: (inputs, accepted [calls, B] of the first provider) -> Cost.
    compiled: device -> the configs at which peers with a long compilation are timed.
    """

    peers: tuple[Peer, ...]
    grid: Callable[..., list[Any]]
    build: Callable[[Any, str], Any]
    cost: Callable[[Any, Tensor], Cost]
    compiled: Callable[[str], tuple[Any, ...]] = lambda device: ()


def _chain_cost(inputs: configs.Inputs, accepted: Tensor) -> Cost:
    config = inputs.config
    return Cost(configs.floor_bytes(config, accepted), configs.visited_bytes(config, accepted))


def _tree_cost(inputs: tree_configs.TreeInputs, accepted: Tensor) -> Cost:
    seen = tree_configs.visits(inputs)
    floor = tree_configs.floor_bytes(inputs.config, seen)
    return Cost(floor, tree_configs.visited_bytes(inputs.config, seen))


def _kv_cost(inputs: kv_configs.KvInputs, accepted: Tensor) -> Cost:
    return Cost(*2 * (kv_configs.floor_bytes(inputs.config),))


def _call_cost(inputs: call_configs.CallInputs, accepted: Tensor) -> Cost:
    return Cost(*2 * (inputs.config.floor_bytes,))


WORKLOADS = {
    "verify_chain": Workload(
        PEERS, configs.grid, configs.build, _chain_cost, lambda device: configs.HEADLINE[device]
    ),
    "verify_tree": Workload(TREE_PEERS, tree_configs.grid, tree_configs.build, _tree_cost),
    "sample": Workload(
        call_configs.PEERS, call_configs.sample_grid, call_configs.build, _call_cost
    ),
    "kv_append_": Workload(
        call_configs.PEERS[:2], call_configs.append_grid, call_configs.build, _call_cost
    ),
    "cases": Workload(
        call_configs.PEERS[:1], call_configs.case_grid, call_configs.build, _call_cost
    ),
    "kv_compact_": Workload(KV_PEERS, kv_configs.grid, kv_configs.build, _kv_cost),
}
