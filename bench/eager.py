"""Sampling and chain verification in batched eager PyTorch, as users write them: a baseline."""

from __future__ import annotations

import torch
from torch import Tensor


def _broadcast(parameter: Tensor | float, logits: Tensor) -> Tensor | float:
    """A parameter [B] in a shape that broadcasts against logits [B, ..., V]."""
    if isinstance(parameter, Tensor):
        return parameter.view(-1, *[1] * (logits.dim() - 1))
    return parameter


def _kth(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """The top_k-th largest logit of each row [..., 1]."""
    if isinstance(top_k, Tensor):
        last = top_k.long().view(-1, *[1] * (logits.dim() - 1)) - 1
        ordered = logits.sort(dim=-1, descending=True).values
        return ordered.gather(-1, last.expand(*logits.shape[:-1], 1))
    return logits.topk(top_k, dim=-1).values[..., -1:]


def filtered(
    logits: Tensor,
    temperature: Tensor | float,
    top_k: Tensor | int,
    top_p: Tensor | float,
) -> Tensor:
    """Probabilities [..., V] after temperature, top-k and top-p, by sorting."""
    logits = logits.float() / _broadcast(temperature, logits)
    if isinstance(top_k, Tensor) or top_k:
        logits = logits.masked_fill(logits < _kth(logits, top_k), -torch.inf)
    if isinstance(top_p, Tensor) or top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        drop = _beyond(ordered.softmax(-1), _broadcast(top_p, logits))
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return logits.softmax(-1)


def _beyond(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """Whether the entries before one, in descending order, already hold a mass of top_p."""
    return probs.cumsum(-1) - probs >= top_p


def _candidates(
    logits: Tensor, temperature: Tensor | float, top_k: int, top_p: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Probabilities and ids [..., top_k]. Some tokens that tie with the last one are dropped."""
    kept, ids = logits.topk(top_k, dim=-1)
    kept = kept.float() / _broadcast(temperature, logits)
    drop = _beyond(kept.softmax(-1), _broadcast(top_p, logits))
    return kept.masked_fill(drop, -torch.inf).softmax(-1), ids


def filtered_candidates(
    logits: Tensor, temperature: Tensor | float, top_k: int, top_p: Tensor | float
) -> Tensor:
    """`filtered` without sorting the row: `torch.topk` first, then top-p among its candidates."""
    probs, ids = _candidates(logits, temperature, top_k, top_p)
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, ids, probs)


def sample(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """One token for each row [R]."""
    return torch.multinomial(filtered(logits, temperature, top_k, top_p), 1)[:, 0]


def sample_candidates(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """`sample` with `filtered_candidates` in the place of `filtered`."""
    probs, ids = _candidates(logits, temperature, top_k, top_p)
    return ids.gather(-1, torch.multinomial(probs, 1))[:, 0]


def verify_chain(
    target: Tensor,
    tokens: Tensor,
    draft: Tensor,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Leviathan's Algorithm 1 over a batch: (tokens [B, gamma+1], num_accepted [B])."""
    p = filtered(target, temperature, top_k, top_p)
    return verify_probs(p, tokens, filtered(draft, temperature, 0, 1.0))


def verify_chain_candidates(
    target: Tensor,
    tokens: Tensor,
    draft: Tensor,
    temperature: Tensor | float,
    top_k: int,
    top_p: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """`verify_chain` with `filtered_candidates` for the target."""
    p = filtered_candidates(target, temperature, top_k, top_p)
    return verify_probs(p, tokens, filtered(draft, temperature, 0, 1.0))


def verify_probs(p: Tensor, tokens: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """`verify_chain` from probabilities p [B, gamma+1, V] and q [B, gamma, V]."""
    gamma = tokens.shape[1]
    p_x = p[:, :gamma].gather(-1, tokens[..., None]).squeeze(-1)
    q_x = q.gather(-1, tokens[..., None]).squeeze(-1)
    accepted = (torch.rand_like(p_x) * q_x < p_x).long().cumprod(-1).sum(-1)
    sequences = torch.arange(len(tokens), device=tokens.device)
    residual = p[sequences, accepted]
    rejected = accepted < gamma
    residual = torch.where(
        rejected[:, None],
        (residual - q[sequences, accepted.clamp(max=gamma - 1)]).clamp(min=0),
        residual,
    )
    y = torch.multinomial(residual / residual.sum(-1, keepdim=True), 1)
    out = torch.cat([tokens, tokens[:, :1]], -1)
    out = out.masked_fill(torch.arange(gamma + 1, device=out.device) >= accepted[:, None], -1)
    return out.scatter(1, accepted[:, None], y), accepted
