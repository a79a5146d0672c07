"""The rows, drafts and decisions of one chain round, for ``SpeculativeDecoder(trace=)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec_hf.cache.protocol import Lengths
from specdec_hf.decode.streaming import Step
from specdec_kernels import SampledDraft


@dataclass(frozen=True, eq=False)
class TracedRound:
    """The rows, drafts and decisions of one round. Tensors are on the target's device.

    Attributes:
        rule: acceptance rule of the call.
        seeds: [B] int64.
        lengths: [B] committed tokens of each sequence before the round, the position of draft 0.
        logits: [B, gamma+1, V], of the target, after the logits processors and before the sampling
            parameters.
        draft_token_ids: [B, gamma]; -1 where a sequence drafted less.
        distribution: what the drafts were drawn from; None for deterministic drafts.
        accept_probs: [B, gamma], as in `Verdict`.
        steps: what the round appended to each active sequence.
    """

    rule: str
    seeds: torch.Tensor
    lengths: Lengths
    logits: torch.Tensor
    draft_token_ids: torch.Tensor
    distribution: SampledDraft | None
    accept_probs: torch.Tensor
    steps: list[Step]


Trace = Callable[[TracedRound], None]
