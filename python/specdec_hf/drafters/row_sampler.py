"""Sampling drafts from rows of logits with the sampling parameters of the call."""

from __future__ import annotations

from typing import Any

import torch

from specdec_hf.drafters.context import DraftContext
from specdec_kernels import Sampled, sample


class RowSampler:
    """Draws one token from each row.

    Args:
        context: the call.
        device: where the rows will be.
    """

    def __init__(self, context: DraftContext, device: torch.device) -> None:
        self.context = context
        self.sampling: dict[str, Any] = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in (
                ("temperature", context.temperature),
                ("top_k", context.top_k),
                ("top_p", context.top_p),
                ("min_p", context.min_p),
            )
        }
        self.seeds = context.seeds.to(device)

    def sample(
        self, logits: torch.Tensor, positions: torch.Tensor, *, filtered: bool = True
    ) -> Sampled:
        """One token from each row of logits [B, m, V]; every field of the result is [B, m].

        Args:
            logits: the rows.
            positions: [B, m] int64, where the noise of each row comes from.
            filtered: False leaves out top-k, top-p and min-p.
        """
        rows = logits.shape[1]
        sampling: dict[str, Any] = {
            name: value.repeat_interleave(rows) if isinstance(value, torch.Tensor) else value
            for name, value in self.sampling.items()
            if filtered or name == "temperature"
        }
        drawn = sample(
            logits.flatten(0, 1),
            **sampling,
            seeds=self.seeds.repeat_interleave(rows),
            positions=positions.flatten(),
            noise="shared" if self.context.rule == "match" else "draft",
        )
        return Sampled(*(x.view(-1, rows) for x in drawn))
