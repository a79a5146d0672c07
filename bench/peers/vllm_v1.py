"""vLLM's V1 rejection sampler, `RejectionSampler.forward`, from raw logits.

It needs the draft's probabilities, so that their softmax is part of the call. On the CPU, vLLM's
CPU build replaces the Triton kernels by C++ functions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from bench.configs import FILTERS, Inputs
from bench.peers.base import Peer, Unsupported, importable


@functools.cache
def _kernels() -> None:
    from vllm.platforms import current_platform  # noqa: PLC0415

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def build(inputs: Inputs) -> Callable[[], Any]:
    from vllm.v1.sample.logits_processor import LogitsProcessors  # noqa: PLC0415
    from vllm.v1.sample.metadata import SamplingMetadata  # noqa: PLC0415
    from vllm.v1.sample.rejection_sampler import RejectionSampler  # noqa: PLC0415
    from vllm.v1.sample.sampler import Sampler  # noqa: PLC0415
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: PLC0415

    config, device = inputs.config, inputs.target.device
    if config.start == "probs":
        raise Unsupported("starts from logits")
    _kernels()
    b, gamma, v = config.batch, config.gamma, config.vocabulary
    temperature, top_k, top_p = FILTERS[config.filters]
    ones = torch.ones(b, device=device)
    sampling = SamplingMetadata(
        temperature=ones * temperature,
        all_greedy=False,
        all_random=True,
        top_p=ones * top_p if top_p < 1 else None,
        top_k=torch.full((b,), top_k, dtype=torch.int32, device=device) if top_k else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=ones * 0,
        presence_penalties=ones * 0,
        repetition_penalties=ones,
        output_token_ids=[[] for _ in range(b)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    rows = torch.arange(b * (gamma + 1), dtype=torch.int32, device=device).view(b, gamma + 1)
    count = torch.arange(1, b + 1, dtype=torch.int32, device=device)
    metadata = SpecDecodeMetadata(
        draft_token_ids=inputs.turns[0].tokens.int().flatten(),
        num_draft_tokens=[gamma] * b,
        cu_num_draft_tokens=count * gamma,
        cu_num_sampled_tokens=count * (gamma + 1),
        target_logits_indices=rows[:, :gamma].flatten(),
        bonus_logits_indices=rows[:, gamma].contiguous(),
        logits_indices=rows.flatten(),
    )
    turns = itertools.cycle(
        [
            dataclasses.replace(metadata, draft_token_ids=turn.tokens.int().flatten())
            for turn in inputs.turns
        ]
    )
    sampler = RejectionSampler(Sampler())
    logits, draft = inputs.target.view(-1, v), inputs.draft.view(-1, v)

    def once() -> Any:
        q = (draft.float() / temperature if temperature != 1 else draft).softmax(
            -1, dtype=torch.float32
        )
        return sampler(next(turns), q, logits, sampling).sampled_token_ids

    return once


PEERS = (
    Peer(
        "vllm-v1",
        lambda device: importable("vllm"),
        build,
        accepted=lambda tokens: (tokens >= 0).sum(-1) - 1,
    ),
)
