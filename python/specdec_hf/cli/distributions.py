"""P and Q over the whole vocabulary: exactly the distributions that the verification compares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import SampledDraft, sample


def target_probs(logits: Tensor, sampling: dict[str, Any]) -> Tensor:
    """P of each row, [R, V] -> [R, V] float64; one-hot at temperature 0.

    Args:
        logits: of the target, after the logits processors.
        sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``, one number each.
    """
    zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    drawn = sample(logits, **sampling, seeds=zeros, positions=zeros)
    if sampling["temperature"] == 0:
        return one_hot(drawn.tokens, logits.shape[-1])
    return _probs(logits, sampling["temperature"], drawn.logsumexp, drawn.threshold)


def draft_probs(tokens: Tensor, distribution: SampledDraft | None, vocab_size: int) -> Tensor:
    """Q of each draft, [B, gamma] -> [B, gamma, vocab_size] float64.

    Args:
        tokens: the drafts; none is -1.
        distribution: what they were drawn from, at one temperature; None for deterministic drafts.
        vocab_size: of the target. Draft rows may be longer or shorter.
    """
    if distribution is None or distribution.temperature == 0:
        return one_hot(tokens, vocab_size)
    temperature = distribution.temperature
    assert not isinstance(temperature, Tensor), "one temperature for all sequences"
    q = _probs(distribution.logits, temperature, distribution.logsumexp, distribution.threshold)
    return torch.nn.functional.pad(q, (0, vocab_size - q.shape[-1]))  # a negative pad cuts


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """[..., vocab_size] float64 with all mass on each token."""
    return torch.nn.functional.one_hot(tokens, vocab_size).double()


def _probs(logits: Tensor, temperature: float, logsumexp: Tensor, threshold: Tensor) -> Tensor:
    """Probabilities from the statistics that `sample` returned, normalised to the last digit."""
    scaled = logits.double() / temperature - logsumexp[..., None]
    probs = torch.where(logits >= threshold[..., None], scaled.exp(), 0.0)
    return probs / probs.sum(-1, keepdim=True)
