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
    as_logits: whether the drafts come with the logits that they were drawn from, or, for code of
        others that reads them, with probabilities.
    """

    rule: Rule
    seeds: Tensor
    positions: Tensor
    drawn: int = 0
    as_logits: bool = True

    def came_with_logits(self) -> bool:
        return self.as_logits and self.drawn > 0


def sample_from_logits(original: Any, settings: Settings) -> Any:
    """Drafts that are drawn with the seeds of their requests, and their distributions.

    vLLM's own function returns probabilities. Its runner only hands them to the rejection sampler,
    so where that is the plug-in's, the logits that are there already take their place.
    """

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
            self.specdec_noise = None  # all drafts of a step come with the same form
            return original(self, logits, sampling_metadata)
        temperature = sampling_metadata.temperature
        temperature = torch.where(temperature < GREEDY_BELOW, 0.0, temperature)
        first, noise.drawn = noise.drawn, noise.drawn + drafts
        positions = draft_positions(noise.positions, noise.drawn, rule=noise.rule)[:, first:]
        tokens = sample(
            logits,
            temperature=temperature.repeat_interleave(drafts),
            seeds=noise.seeds.repeat_interleave(drafts),
            positions=positions.flatten(),
            noise="shared" if noise.rule == "match" else "draft",
        ).tokens
        if not noise.as_logits:
            divisor = torch.where(temperature == 0, 1.0, temperature).repeat_interleave(drafts)
            logits = (logits.float() / divisor[:, None]).softmax(-1)
        return tokens.clamp_min(0), logits

    return _sample_from_logits
