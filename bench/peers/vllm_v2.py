"""vLLM's V2 rejection sampler, from raw logits, installed or by its carried files.

As in its model runner, if a request has a temperature or a filter, the target's logits are copied
to float32, divided and masked before `rejection_sample`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from bench.carried import vllm_available, vllm_module
from bench.configs import FILTERS, Inputs
from bench.peers.base import Peer, Unsupported


def _available(device: str) -> str:
    return vllm_available() if device == "cuda" else "its kernels are Triton's: runs on cuda"


def build(inputs: Inputs) -> Callable[[], Any]:
    filters = vllm_module("vllm.v1.sample.ops.topk_topp_triton")
    gpu = "vllm.v1.worker.gpu"
    rules = vllm_module(f"{gpu}.spec_decode.rejection_sampler_utils")
    apply_temperature = vllm_module(f"{gpu}.sample.gumbel").apply_temperature
    config, device = inputs.config, inputs.target.device
    if config.start == "probs":
        raise Unsupported("starts from logits")
    b, gamma, v = config.batch, config.gamma, config.vocabulary
    temperature, top_k, top_p = FILTERS[config.filters]
    rows = b * (gamma + 1)
    index = torch.arange(b, dtype=torch.int32, device=device)
    expanded = index.repeat_interleave(gamma + 1)
    local = torch.arange(gamma + 1, dtype=torch.int32, device=device).repeat(b)
    target_indptr = torch.arange(b + 1, dtype=torch.int32, device=device) * (gamma + 1)
    # Row i holds the token before draft i: the last sampled token, then the drafts.
    turns = itertools.cycle(
        [
            (torch.nn.functional.pad(turn.tokens, (1, 0)).int().flatten(), turn.seeds)
            for turn in inputs.turns
        ]
    )
    positions = (inputs.positions[:, None] + local.view(b, gamma + 1)).flatten()
    temperatures = torch.full((b,), temperature, device=device)
    k = torch.full((rows,), top_k, dtype=torch.int32, device=device) if top_k else None
    p = torch.full((rows,), top_p, device=device) if top_p < 1 else None
    logits = inputs.target.view(-1, v)

    def once() -> Any:
        sampled, seeds = next(turns)
        processed = logits
        if temperature != 1 or k is not None or p is not None:
            processed = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
            if temperature != 1:
                apply_temperature(processed, expanded, temperatures)
            processed = filters.apply_top_k_top_p_triton(processed, k, p)
        return rules.rejection_sample(
            processed,
            inputs.draft,
            sampled,
            target_indptr,
            positions,
            index,
            expanded,
            local,
            temperatures,
            seeds,
            gamma,
        )

    return once


PEERS = (Peer("vllm-v2", _available, build, accepted=lambda result: result[1] - 1),)
