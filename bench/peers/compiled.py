"""The eager rule, compiled by `torch.compile`."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import torch

from bench import eager
from bench.configs import Inputs
from bench.peers.base import Peer, importable


def _available(device: str) -> str:
    if device == "cuda":
        return importable("triton")
    return "" if shutil.which("g++") or shutil.which("clang++") else "torch.compile needs g++"


def build(inputs: Inputs) -> Callable[[], Any]:
    torch._dynamo.reset()  # compiles anew for each config, without symbolic sizes
    turns = itertools.cycle(inputs.turns)
    if inputs.config.start == "probs":
        from_probs = torch.compile(eager.verify_probs, dynamic=False)
        return lambda: from_probs(inputs.target, next(turns).tokens, inputs.draft)
    rule = torch.compile(eager.verify_chain, dynamic=False)
    parameters = (inputs.temperature, inputs.top_k, inputs.top_p)
    return lambda: rule(inputs.target, next(turns).tokens, inputs.draft, *parameters)


PEERS = (Peer("compiled", _available, build, compiles=True),)
