"""`verify_chain` from raw logits against the eager rule and, at B=1, transformers."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from bench.configs import FILTERS, SHOWS, TURNS, Point, build, floor_bytes, touched_bytes
from bench.peers import PEERS, Unsupported

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
BY_NAME = {peer.name: peer for peer in PEERS}
OURS = BY_NAME["cpp"]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.id)
def test_verify_chain(compare, point):
    inputs = build(point)
    peers = {}
    for name in ("eager", "eager-topk", "transformers"):
        with contextlib.suppress(Unsupported):
            peers[name] = BY_NAME[name].build(inputs)
    ours = OURS.build(inputs)
    plain = point.dtype == "float32" and point.start == "logits" and not inputs.filtering
    accepted = torch.stack([OURS.accepted(ours()) for _ in range(TURNS)])
    floor = floor_bytes(point, accepted)
    compare(
        ours,
        peers,
        floor=floor,
        touched=touched_bytes(point, accepted),
        exps=floor / point.element if plain else 0,  # one for each entry that is read
    )
