"""Tensors of drafts that several drafters cut and join."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_kernels import SampledDraft


def mask_below_limits(
    tokens: torch.Tensor, depths: torch.Tensor, limits: NDArray[np.int64]
) -> torch.Tensor:
    """Tokens [B, N] with -1 where the depth [B, N] or [1, N] exceeds the sequence's limit."""
    bounds = torch.from_numpy(limits.copy()).to(tokens.device, non_blocking=True)
    return tokens.masked_fill(depths > bounds[:, None], -1)


def one_hot_logits(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [B, n, V] of deterministic drafts [B, n]: 0 at the token, -inf elsewhere.

    An absent draft, -1, gets the row of token 0.
    """
    logits = torch.full((*tokens.shape, vocab_size), -torch.inf, device=tokens.device)
    return logits.scatter_(2, tokens.clamp(min=0)[..., None], 0.0)


def concat_distributions(
    parts: Sequence[SampledDraft], temperature: float | torch.Tensor, device: torch.device
) -> SampledDraft:
    """The rows [B, m, V] of several draft distributions one after the other, on one device."""
    return SampledDraft(
        torch.cat([part.logits.to(device) for part in parts], dim=1),
        torch.cat([part.logsumexp.to(device) for part in parts], dim=1),
        torch.cat([part.threshold.to(device) for part in parts], dim=1),
        temperature,
    )
