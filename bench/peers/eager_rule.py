"""The batched rule in eager PyTorch, with filters by sorting or by `torch.topk`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from bench import eager
from bench.configs import FILTERS, Inputs
from bench.peers.base import Peer, Unsupported


def build(inputs: Inputs) -> Callable[[], Any]:
    turns = itertools.cycle(inputs.turns)
    if inputs.config.start == "probs":
        return lambda: eager.verify_probs(inputs.target, next(turns).tokens, inputs.draft)
    parameters = (inputs.temperature, inputs.top_k, inputs.top_p)
    return lambda: eager.verify_chain(inputs.target, next(turns).tokens, inputs.draft, *parameters)


def build_topk(inputs: Inputs) -> Callable[[], Any]:
    top_k = FILTERS[inputs.config.filters][1]
    if inputs.config.start == "probs" or not top_k:
        raise Unsupported("takes raw logits and a top-k")
    turns = itertools.cycle(inputs.turns)
    parameters = (inputs.temperature, top_k, inputs.top_p)
    rule = eager.verify_chain_candidates
    return lambda: rule(inputs.target, next(turns).tokens, inputs.draft, *parameters)


PEERS = (
    Peer("eager", lambda device: "", build),
    Peer("eager-topk", lambda device: "", build_topk),
)
