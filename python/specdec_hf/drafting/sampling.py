"""Statistics of drawn drafts, and drafts within the limits of a round."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.call import Drawn
from specdec_hf.runner.protocol import to_device
from specdec_hf.schedules.base import TokenStats


def token_stats(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float | torch.Tensor,
    threshold: torch.Tensor,
) -> list[TokenStats]:
    """The statistics of tokens that were drawn from logits. It reads from the device once.

    Args:
        logits: [B, m, V] that the tokens were drawn from.
        tokens: [B, m] int64; the statistics of -1, which is no draft, are NaN.
        temperature: float, or [B]. At 0 they are those of the softmax of all logits.
        threshold: [B, m], of the raw logits, below which the filters dropped tokens; see `sample`.

    Returns:
        m entries.
    """
    device = logits.device
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=device).expand(len(logits))
    greedy = (scale == 0)[:, None, None]
    rows = logits.float()
    rows = rows.masked_fill((rows < threshold[..., None].to(device)) & ~greedy, -torch.inf)
    logprobs = (rows / torch.where(greedy, 1.0, scale[:, None, None])).log_softmax(dim=-1)
    probs = logprobs.exp()
    drawn = probs.gather(2, tokens.clamp(min=0)[..., None].to(device))[..., 0]
    # 0 * log(0) is 0 here.
    entropy = -(probs * logprobs.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)
    stats = torch.stack([drawn, entropy])
    read = stats.masked_fill(tokens.to(device) < 0, torch.nan).cpu().numpy()
    return [TokenStats(*np.ascontiguousarray(read[:, :, i])) for i in range(tokens.shape[1])]


def stats_of_draft(
    tokens: torch.Tensor, drawn: Drawn, temperature: float | torch.Tensor
) -> list[TokenStats]:
    """The statistics of a whole draft [B, gamma] that came with its distribution."""
    device = drawn.logits.device
    return token_stats(drawn.logits, tokens.to(device), temperature, drawn.threshold)


def depths_of(parents: torch.Tensor, most: int) -> torch.Tensor:
    """The depth of each node of trees [B, N], from 1; deeper than ``most`` is one that is."""
    size = parents.shape[1]
    # Column 0 is the root. Each step looks twice as far up as the one before it.
    above = torch.nn.functional.pad(parents.clamp(-1, size - 1) + 1, (1, 0))
    depths = torch.ones_like(above)
    depths[:, 0] = 0
    for _ in range(most.bit_length()):
        depths = depths + depths.gather(1, above)
        above = above.gather(1, above)
    return depths[:, 1:]


def mask_below_limits(
    tokens: torch.Tensor, depths: torch.Tensor, limits: NDArray[np.int64]
) -> torch.Tensor:
    """Tokens [B, N] with -1 where the depth [B, N] or [1, N] exceeds the sequence's limit."""
    bounds = to_device(limits, tokens.device)
    return tokens.masked_fill(depths > bounds[:, None], -1)
