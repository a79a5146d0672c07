"""Specification of `expand_tree`, one level of a tree whose shape follows the draft's confidence.

The *frontier* holds the nodes that are expanded next. The score of a node is the log-probability
of its path under the draft. Source: EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...arguments.checks import float32


def expand_tree(
    logits: Tensor, scores: Tensor, width: int, temperatures: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` likeliest children of each frontier node, and the next frontier among them."""
    b, f, _ = logits.shape
    t = torch.full((b,), float32(temperature)) if temperatures is None else temperatures
    t = torch.where(t == 0, 1.0, t.double())[:, None]
    rows = logits.double()
    top = rows.max(-1).values  # NaN if the row holds one
    valid = top.isfinite() & scores.isfinite() & (t > 0) & t.isfinite()
    scaled = (rows - top[..., None]) / t[..., None]
    logprobs = scaled - scaled.exp().sum(-1, keepdim=True).log()

    tokens = rows.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    out = (scores.double()[..., None] + logprobs.gather(-1, tokens)).float()
    out = torch.where(valid[..., None], out, -torch.inf)
    missing = width - tokens.shape[-1]
    out = torch.nn.functional.pad(out, (0, missing), value=-torch.inf)
    tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    tokens = torch.where(out > -torch.inf, tokens, -1)
    frontier = out.view(b, f * width).sort(dim=-1, descending=True, stable=True).indices
    return tokens, out, frontier[:, :width].contiguous()
