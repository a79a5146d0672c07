"""Prompts of very different lengths, which a batch reads one sequence at a time.

A forward of the whole batch is as wide as its longest prompt, and a CPU computes the padding of the
others like tokens. Each sequence alone costs one more pass over the weights, which takes about as
long as `TOKENS_OF_A_PASS` tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from specdec_hf.cache.protocol import Lengths

TOKENS_OF_A_PASS = 48


def reads_alone(cache: Any, starts: Lengths, size: int, keep: int) -> bool:
    """Whether the sequences of an empty cache are read one by one.

    Args:
        cache: a `SpecCache`.
        starts: [B], position of each sequence's first token; negative ones are padding.
        size: tokens of each sequence, padding included.
        keep: rows of logits that are wanted.
    """
    padding = -int(starts.sum())
    return (
        cache.one_by_one
        and not cache.lengths.any()
        and keep <= size + int(starts.min())
        and cache.device.type == "cpu"
        and cache.later_inputs is None
        and (cache.widths is None or cache.widths.fixed is None)
        and int(starts.max()) <= 0
        and padding > TOKENS_OF_A_PASS * (len(starts) - 1)
    )


def read_alone(cache: Any, tokens: torch.Tensor, starts: Lengths, keep: int) -> torch.Tensor:
    """Logits [B, keep, V] of the last tokens; keys, values and hidden states go to the cache."""
    logits, hidden = [], []
    for b, padding in enumerate((-starts).tolist()):
        row = cache.of_one_sequence(tokens.shape[1] - padding)
        logits.append(row.forward(tokens[b : b + 1, padding:], starts[b : b + 1] * 0, keep))
        cache.adopt(b, row)
        hidden += [
            {layer: pad(states, (0, 0, padding, 0)) for layer, states in one.items()}
            for one in row.hidden_states or ()
        ]
    if cache.hidden_states is not None:
        cache.hidden_states.append(
            {layer: torch.cat([one[layer] for one in hidden]) for layer in hidden[0]}
        )
    return torch.cat(logits)
