"""Times `verify_tree` against eager PyTorch with a softmax of all rows, or of the path's rows."""

from __future__ import annotations

import contextlib

import pytest

from bench.peers import TREE_PEERS, Unsupported
from bench.tree_configs import build, floor_bytes, grid, visited_bytes, visits

BY_NAME = {peer.name: peer for peer in TREE_PEERS}


@pytest.mark.parametrize("config", grid("cpu"), ids=lambda config: config.id)
def test_verify_tree(compare, config):
    inputs = build(config)
    peers = {}
    for name in ("eager", "eager-path"):
        with contextlib.suppress(Unsupported):
            peers[name] = BY_NAME[name].build(inputs)
    seen = visits(inputs)
    floor = floor_bytes(config, seen)
    plain = config.dtype == "float32" and config.filters == "off" and config.rule != "greedy"
    compare(
        BY_NAME["cpp"].build(inputs),
        peers,
        floor=floor,
        bytes_read=visited_bytes(config, seen),
        exps=floor / config.element if plain else 0,  # one exponential for each entry read
    )
