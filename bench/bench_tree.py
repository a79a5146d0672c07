"""`verify_tree` against eager PyTorch: a softmax of all rows, or of those on the path alone."""

from __future__ import annotations

import contextlib

import pytest

from bench.peers import TREE_PEERS, Unsupported
from bench.tree_configs import build, floor_bytes, grid, touched_bytes, visits

BY_NAME = {peer.name: peer for peer in TREE_PEERS}


@pytest.mark.parametrize("point", grid("cpu"), ids=lambda point: point.id)
def test_verify_tree(compare, point):
    inputs = build(point)
    peers = {}
    for name in ("eager", "eager-path"):
        with contextlib.suppress(Unsupported):
            peers[name] = BY_NAME[name].build(inputs)
    seen = visits(inputs)
    floor = floor_bytes(point, seen)
    plain = point.dtype == "float32" and point.filters == "off" and point.rule != "greedy"
    compare(
        BY_NAME["cpp"].build(inputs),
        peers,
        floor=floor,
        touched=touched_bytes(point, seen),
        exps=floor / point.element if plain else 0,  # one for each entry that is read
    )
