"""The uniforms of a call, for whoever wants to show why a token was accepted or drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.row.noise import ACCEPT, RESIDUAL, uniform


def acceptance_uniforms(
    seeds: Tensor, positions: Tensor, gamma: int, rule: str = "token"
) -> Tensor:
    """The uniforms that `verify_chain` compares with the acceptance probabilities.

    They come from (seed, position + i), and under rule `block` from the round; see
    docs/rules.md#noise. The arguments are read on the host.

    Args:
        seeds, positions: [B] int64, those of `verify_chain`.
        gamma: how many drafts.
        rule: of the verification.

    Returns:
        [B, gamma] float64 on the host.

    >>> acceptance_uniforms(torch.tensor([7]), torch.tensor([3]), 2)
    tensor([[0.0030, 0.9574]], dtype=torch.float64)
    """
    of_round = rule == "block"
    rows = [
        [
            uniform(seed, begin if of_round else begin + i, ACCEPT, i if of_round else 0)
            for i in range(gamma)
        ]
        for seed, begin in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").reshape(len(rows), gamma)


def draw_uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """The uniforms by which `verify_chain` draws recovered and bonus tokens, except for rule match.

    The token is the first whose cumulative probability exceeds the uniform, in the order of ids.
    The arguments are read on the host.

    Args:
        seeds: [B] int64, of `verify_chain`.
        positions: [B] int64, the absolute index of each token: `positions + num_accepted`.

    Returns:
        [B] float64 on the host.

    >>> draw_uniforms(torch.tensor([7]), torch.tensor([3]))
    tensor([0.7830], dtype=torch.float64)
    """
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    drawn = [uniform(seed, position, RESIDUAL) for seed, position in pairs]
    return torch.tensor(drawn, dtype=torch.float64, device="cpu")
