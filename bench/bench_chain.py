"""Times `verify_chain` from raw logits against eager PyTorch and, at B=1, transformers."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

from bench.configs import FILTERS, HEADLINE, TURNS, Config, build, floor_bytes, visited_bytes
from bench.peers import PEERS, Unsupported

SIZES = (Config(), Config(batch=1), Config(batch=1, vocabulary=128256))
CONFIGS = dict.fromkeys(
    [
        *HEADLINE["cpu"],
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


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.id)
def test_verify_chain(compare, config):
    inputs = build(config)
    peers = {}
    for name in ("eager", "eager-topk", "transformers"):
        with contextlib.suppress(Unsupported):
            peers[name] = BY_NAME[name].build(inputs)
    ours = OURS.build(inputs)
    plain = config.dtype == "float32" and config.start == "logits" and not inputs.filtering
    accepted = torch.stack([OURS.accepted(ours()) for _ in range(TURNS)])
    floor = floor_bytes(config, accepted)
    compare(
        ours,
        peers,
        floor=floor,
        bytes_read=visited_bytes(config, accepted),
        exps=floor / config.element if plain else 0,  # one exponential for each entry read
    )
