"""FlashInfer's `chain_speculative_sampling`.

If it has to start from logits, FlashInfer's softmax, top-k and top-p are part of the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from bench.configs import FILTERS, Inputs
from bench.peers.base import Peer, importable


def _available(device: str) -> str:
    return importable("flashinfer") if device == "cuda" else "runs on cuda"


def build(inputs: Inputs) -> Callable[[], Any]:
    from flashinfer import sampling  # noqa: PLC0415

    b, gamma, v = inputs.config.batch, inputs.config.gamma, inputs.config.vocabulary
    temperature, top_k, top_p = FILTERS[inputs.config.filters]
    target, draft = inputs.target.view(-1, v), inputs.draft.view(-1, v)
    turns = itertools.cycle([(turn.tokens.int(), turn.seeds[:1]) for turn in inputs.turns])
    # Seeds are tensors, because a captured graph would draw the same numbers from integers.
    offset = torch.zeros(1, dtype=torch.int64, device=target.device)

    def distributions() -> tuple[torch.Tensor, torch.Tensor]:
        p = sampling.softmax(target, temperature)
        if top_k:
            p = sampling.top_k_renorm_probs(p, top_k)
        if top_p < 1:
            p = sampling.top_p_renorm_probs(p, top_p)
        return p, sampling.softmax(draft, temperature)

    def once() -> Any:
        tokens, seed = next(turns)
        p, q = (target, draft) if inputs.config.start == "probs" else distributions()
        return sampling.chain_speculative_sampling(
            q.view(b, gamma, v),
            tokens,
            p.view(b, gamma + 1, v),
            seed=seed,
            offset=offset,
        )

    return once


PEERS = (Peer("flashinfer", _available, build, accepted=lambda result: result[2]),)
