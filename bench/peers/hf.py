"""Transformers' `_speculative_sampling`, with the warpers that its generation loop applies first.

The loop converts the target's logits to float32 and warps one row after another. The assistant
model has warped the draft's logits already, so that their temperature is not part of the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from bench.configs import FILTERS, Inputs
from bench.peers.base import Peer, Unsupported, importable


def build(inputs: Inputs) -> Callable[[], Any]:
    from transformers.generation import logits_process, utils  # noqa: PLC0415

    config = inputs.config
    if config.batch != 1:
        raise Unsupported("takes one sequence")
    if config.start == "probs":
        raise Unsupported("starts from logits")
    temperature, top_k, top_p = FILTERS[config.filters]
    warpers: list[Any] = []
    if temperature != 1:
        warpers.append(logits_process.TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(logits_process.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(logits_process.TopPLogitsWarper(top_p))
    turns = itertools.cycle(inputs.turns)
    draft = inputs.draft.float() / temperature

    def once() -> Any:
        ids = next(turns).tokens
        logits = inputs.target.to(torch.float32, copy=bool(warpers))
        for i in range(config.gamma + 1) if warpers else ():
            for warp in warpers:
                logits[:, i] = warp(ids, logits[:, i])
        return utils._speculative_sampling(ids, draft, config.gamma, logits)

    return once


PEERS = (
    Peer(
        "transformers",
        lambda device: importable("transformers"),
        build,
        accepted=lambda result: torch.as_tensor(result[1]).reshape(1),
        reads=True,
    ),
)
