"""The log probabilities that the model gives to the tokens of a step and to the likeliest ones."""

from __future__ import annotations

import torch

from specdec_hf.loop.streaming import Step
from specdec_kernels import TreeVerdict, Verdict


def add_top_logprobs(
    step: Step, count: int, index: int, logits: torch.Tensor, verdict: Verdict | TreeVerdict
) -> None:
    """Fill `Step.top_logprobs`.

    Args:
        step: of the round.
        count: how many of the likeliest tokens are listed.
        index: of its sequence in the tensors.
        logits: [B, N+1, V], as in `TracedRound`.
        verdict: of the round.
    """
    # Row 0 is that of the first token of a chain. Row n+1 of a tree is that behind node n.
    chosen = list(range(len(step.tokens)))
    if isinstance(verdict, TreeVerdict):
        path = verdict.path[index, : len(step.tokens) - 1].tolist()
        chosen = [0, *(node + 1 for node in path)]
    rows = logits[index, chosen].float().log_softmax(dim=-1)
    likeliest = rows.topk(min(count, rows.shape[-1]), dim=-1)
    for i, token in enumerate(step.tokens):
        pairs = zip(likeliest.indices[i].tolist(), likeliest.values[i].tolist(), strict=True)
        step.top_logprobs.append({token: float(rows[i, token]), **dict(pairs)})
