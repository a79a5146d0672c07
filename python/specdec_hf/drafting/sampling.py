"""Sampling drafts from rows of logits with the sampling parameters of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import PARAMETERS
from specdec_hf.drafting.context import DraftContext
from specdec_hf.runner.protocol import to_device
from specdec_hf.schedules.base import TokenStats
from specdec_kernels import Sampled, SampledDraft, sample


class RowSampler:
    """Draws one token from each row.

    Args:
        context: the call.
        device: where the rows will be.
        own: sampling parameters in the place of those of the call.
    """

    def __init__(
        self,
        context: DraftContext,
        device: torch.device,
        own: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.context = context
        self.sampling: dict[str, Any] = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name in PARAMETERS
            for value in [getattr(context, name)]
        }
        self._own_temperature = own.get("temperature")
        self.sampling.update({name: own[name] for name in own if name != "temperature"})
        if self._own_temperature == 0:
            self.sampling["top_k"] = 1
        self.seeds = context.seeds.to(device)

    def adopt(self, b: int, other: RowSampler, index: int) -> None:
        """Draw for sequence ``b`` as another sampler does for its sequence ``index``."""
        self.seeds[b] = other.seeds[index]
        for name, values in self.sampling.items():
            if isinstance(values, torch.Tensor):
                values[b] = other.sampling[name][index]

    def at_own_temperature(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [B, ...] whose distribution at the call's temperature is the drafter's own.

        So the drafts of several drafters have one temperature. Greedy sequences keep their logits.
        """
        own, temperature = self._own_temperature, self.sampling["temperature"]
        if not own:
            return logits
        if isinstance(temperature, torch.Tensor):
            scale = torch.where(temperature > 0, temperature / own, 1.0)
            return logits.float() * scale.view(-1, *[1] * (logits.ndim - 1))
        return logits.float() * (temperature / own) if temperature > 0 else logits

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


def stats_of_draft(tokens: torch.Tensor, distribution: SampledDraft) -> list[TokenStats]:
    """The statistics of a whole draft [B, gamma] that came with its distribution."""
    return token_stats(
        distribution.logits,
        tokens.to(distribution.logits.device),
        distribution.temperature,
        distribution.threshold,
    )


def mask_below_limits(
    tokens: torch.Tensor, depths: torch.Tensor, limits: NDArray[np.int64]
) -> torch.Tensor:
    """Tokens [B, N] with -1 where the depth [B, N] or [1, N] exceeds the sequence's limit."""
    bounds = to_device(limits, tokens.device)
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
