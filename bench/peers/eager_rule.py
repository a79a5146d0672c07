"""The batched rule in eager PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from bench import eager
from bench.peers.base import Peer
from bench.points import Inputs


def build(inputs: Inputs) -> Callable[[], Any]:
    turns = itertools.cycle(inputs.turns)
    if inputs.point.start == "probs":
        return lambda: eager.verify_probs(inputs.target, next(turns).tokens, inputs.draft)
    parameters = (inputs.temperature, inputs.top_k, inputs.top_p)
    return lambda: eager.verify_chain(inputs.target, next(turns).tokens, inputs.draft, *parameters)


PEERS = (Peer("eager", lambda device: "", build),)
