"""What takes the place of the drafting of vLLM's V1 runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Rule, draft_positions, sample
from specdec_vllm.messages import warn_once
from specdec_vllm.settings import Settings
from specdec_vllm.vllm_interface import GREEDY_BELOW


@dataclass
class DraftNoise:
    """What the next drafts of a batch are drawn with.

    rule: that verifies them.
    seeds: [B] int64.
    positions: [B] int64, the absolute index of the first draft.
    drawn: drafts of each request so far.
    """

    rule: Rule
    seeds: Tensor
    positions: Tensor
    drawn: int = 0


def sample_from_logits(original: Any, settings: Settings) -> Any:
    """Drafts with probabilities, drawn with the seeds of their requests."""

    def _sample_from_logits(self: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        noise = getattr(self, "specdec_noise", None)
        greedy = sampling_metadata.all_greedy or not self._enable_probabilistic_draft_probs
        if greedy or noise is None:
            return original(self, logits, sampling_metadata)
        # Parallel drafting passes the rows of all drafts of a request, one request after another.
        drafts, rest = divmod(len(logits), len(noise.seeds))
        if rest or not drafts:
            warn_once(
                "specdec_vllm: drafts come from vLLM's own noise: their number must be a multiple "
                "of %d requests, got %d",
                len(noise.seeds),
                len(logits),
            )
            return original(self, logits, sampling_metadata)
        temperature = sampling_metadata.temperature.repeat_interleave(drafts)
        sampled = temperature >= GREEDY_BELOW
        logits = logits.float() / torch.where(sampled, temperature, 1.0)[:, None]
        first, noise.drawn = noise.drawn, noise.drawn + drafts
        positions = draft_positions(noise.positions, noise.drawn, rule=noise.rule)[:, first:]
        tokens = sample(
            logits,
            temperature=sampled.float(),
            seeds=noise.seeds.repeat_interleave(drafts),
            positions=positions.flatten(),
            noise="shared" if noise.rule == "match" else "draft",
        ).tokens
        return tokens.clamp_min(0), logits.softmax(-1)

    return _sample_from_logits
