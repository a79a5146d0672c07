"""The log probabilities that the model gives to the tokens of a step and to the likeliest ones."""

from __future__ import annotations

from collections.abc import Mapping

from specdec_hf.loop.streaming import TracedRound


def add_top_logprobs(traced: TracedRound, counts: Mapping[int, int | None]) -> None:
    """Fill `Step.top_logprobs` of a round.

    Args:
        traced: the round.
        counts: by `Step.sequence`, how many of the likeliest tokens it wants; None wants nothing.
    """
    for index, step in zip(traced.indices, traced.steps, strict=True):
        count = counts[step.sequence]
        if count is None:
            continue
        # Row 0 is that of the first token of a chain. Row n+1 of a tree is that behind node n.
        chosen = list(range(len(step.tokens)))
        if traced.path is not None:
            path = traced.path[index, : len(step.tokens) - 1].tolist()
            chosen = [0, *(node + 1 for node in path)]
        rows = traced.logits[index, chosen].float().log_softmax(dim=-1)
        likeliest = rows.topk(min(count, rows.shape[-1]), dim=-1)
        for i, token in enumerate(step.tokens):
            pairs = zip(likeliest.indices[i].tolist(), likeliest.values[i].tolist(), strict=True)
            step.top_logprobs.append({token: float(rows[i, token]), **dict(pairs)})
