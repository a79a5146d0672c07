"""Prompts of very different lengths, which are read one by one and not padded to the longest."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from specdec_hf.runner.forwards import ForwardPolicy
from specdec_hf.runner.protocol import (
    TOKENS_OF_A_PASS,
    HiddenStates,
    Lengths,
    tokens_before_rope_switch,
)


def read_alone(
    runner: Any, tokens: torch.Tensor, starts: Lengths, keep: int
) -> torch.Tensor | None:
    """As `SpecRunner.forward`, through a cache of each sequence; a prompt of several is read once.

    Args:
        runner: a `SpecRunner`.
        tokens, starts, keep: as there.

    Returns:
        Logits [B, keep, V], or None where that spares too little, see `TOKENS_OF_A_PASS`, or is not
        possible: tokens are in the cache, or a forward needs more than ids, positions and mask.
    """
    if not (
        not runner.cache.lengths.any()
        and keep <= tokens.shape[1] + int(starts.min())
        and runner.device.type == "cpu"
        and runner.later_inputs is None
        and int(starts.max()) <= 0
        and tokens_before_rope_switch(runner.model, 0) is None
    ):
        return None
    prompts = _without_padding(tokens, starts)
    spared = tokens.numel() - sum(map(len, set(prompts)))
    if spared <= TOKENS_OF_A_PASS * (len(set(prompts)) - 1):
        return None
    logits: list[torch.Tensor] = []
    hidden: list[HiddenStates] = []
    first: dict[tuple[int, ...], int] = {}
    for b, prompt in enumerate(prompts):
        same = first.setdefault(prompt, b)
        if same < b:
            runner.take(b, runner, same)
            logits.append(logits[same])
            hidden.append(hidden[same])
            continue
        padding = -int(starts[b])
        row = _for_one_sequence(runner, len(prompt))
        logits.append(row.forward(tokens[b : b + 1, padding:], starts[b : b + 1] * 0, keep))
        runner.take(b, row)
        taken = row.tap.pop().items()
        hidden.append({layer: pad(states, (0, 0, padding, 0)) for layer, states in taken})
    if runner.tap.is_open:
        runner.tap.add({layer: torch.cat([one[layer] for one in hidden]) for layer in hidden[0]})
    return torch.cat(logits)


def _for_one_sequence(runner: Any, capacity: int) -> Any:
    """An empty runner for a sequence of another, whose forwards are the model's own."""
    policy = ForwardPolicy(omits_mask=runner.policy.omits_mask)
    row = type(runner)(runner.model, 1, capacity + 1, policy)
    row.omitted, row.watch = runner.omitted, runner.watch
    if runner.tap.is_open:
        row.tap.open(runner.tap.layers)
    return row


def _without_padding(tokens: torch.Tensor, starts: Lengths) -> list[tuple[int, ...]]:
    """The tokens of each prompt of [B, n]; ``-starts[b]`` of them are left padding."""
    padded = zip(tokens.tolist(), starts.tolist(), strict=True)
    return [tuple(ids[-start:]) for ids, start in padded]
