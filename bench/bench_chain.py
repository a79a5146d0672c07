"""`verify_chain` from raw logits against the peers that take the same point."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.peers import PEERS, Unsupported
from bench.points import FILTERS, SHOWS, TURNS, Point, build, floor_bytes, touched_bytes

SIZES = (Point(), Point(batch=1), Point(batch=1, vocabulary=128256))
POINTS = dict.fromkeys(
    [
        *SHOWS["cpu"],
        *(
            dataclasses.replace(size, dtype=dtype, filters=filters)
            for dtype in ("float32", "bfloat16")
            for filters in FILTERS
            for size in SIZES
        ),
    ]
)
OURS = next(peer for peer in PEERS if peer.name == "cpp")


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.id)
def test_verify_chain(compare, point):
    inputs = build(point)
    peers = {}
    for peer in PEERS:
        if peer.ours or peer.compiles or peer.available("cpu"):
            continue
        try:
            peers[peer.name] = peer.build(inputs)
        except Unsupported:
            continue
    ours = OURS.build(inputs)
    accepted = torch.stack([OURS.accepted(ours()) for _ in range(TURNS)])
    compare(
        ours,
        peers,
        floor=floor_bytes(point, accepted),
        touched=touched_bytes(point, accepted),
    )
