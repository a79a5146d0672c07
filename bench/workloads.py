"""What the sweep can time: an op, its grid, its implementations and what a call costs at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from bench import configs as points
from bench import kv_configs as kv_points
from bench import tree_configs as tree_points
from bench.peers import KV_PEERS, PEERS, TREE_PEERS, Peer


class Cost(NamedTuple):
    """Bytes of a call, mean over its turns: what no exact rule can do without, what ours reads."""

    floor: float
    touched: float


@dataclass(frozen=True)
class Workload:
    """One op of the sweep.

    grid: device and quick -> points. build: point and device -> inputs. cost: inputs and what the
    first provider accepted [calls, B] -> bytes. compiled: device -> points at which peers with a
    long compilation take part.
    """

    peers: tuple[Peer, ...]
    grid: Callable[..., list[Any]]
    build: Callable[[Any, str], Any]
    cost: Callable[[Any, Tensor], Cost]
    compiled: Callable[[str], tuple[Any, ...]] = lambda device: ()


def _chain_cost(inputs: points.Inputs, accepted: Tensor) -> Cost:
    point = inputs.point
    return Cost(points.floor_bytes(point, accepted), points.touched_bytes(point, accepted))


def _tree_cost(inputs: tree_points.TreeInputs, accepted: Tensor) -> Cost:
    seen = tree_points.visits(inputs)
    floor = tree_points.floor_bytes(inputs.point, seen)
    return Cost(floor, tree_points.touched_bytes(inputs.point, seen))


def _kv_cost(inputs: kv_points.KvInputs, accepted: Tensor) -> Cost:
    return Cost(*2 * (kv_points.floor_bytes(inputs.point),))


WORKLOADS = {
    "verify_chain": Workload(
        PEERS, points.grid, points.build, _chain_cost, lambda device: points.SHOWS[device]
    ),
    "verify_tree": Workload(TREE_PEERS, tree_points.grid, tree_points.build, _tree_cost),
    "kv_compact_": Workload(KV_PEERS, kv_points.grid, kv_points.build, _kv_cost),
}
