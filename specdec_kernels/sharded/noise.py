"""The uniforms of `verify_chain`, for whole tables of positions; see docs/rules.md#noise.

Every rank computes them from the same seeds and positions, so none is exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments.chain import ChainArguments

ACCEPT, RESIDUAL = range(2)
_MASK = 0xFFFFFFFF


def uniform(seeds: Tensor, positions: Tensor, stream: int, counters: Tensor) -> Tensor:
    """Float64 uniforms of 53 bits in [0, 1) from Philox4x32-10, of the broadcast shape.

    The words of the key are those of the seed, the words of the counter are (counter, position low,
    position high, stream).
    """
    positions, counters = torch.broadcast_tensors(positions, counters)
    words: list[Tensor] = [
        counters & _MASK,
        positions & _MASK,
        (positions >> 32) & _MASK,
        torch.full_like(positions, stream),
    ]
    low, high = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(10):
        # The products wrap around int64, which keeps their bits; the mask drops copies of the sign.
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (b >> 32) & _MASK ^ words[1] ^ low,
            b & _MASK,
            (a >> 32) & _MASK ^ words[3] ^ high,
            a & _MASK,
        ]
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return ((words[1] << 32 | words[0]) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def acceptance_uniforms(a: ChainArguments) -> Tensor:
    """[B, gamma] float64. Those of rule block belong to the round, others to their position."""
    if a.uniforms is not None:
        return a.uniforms[:, :-1]
    drafts = torch.arange(a.draft_token_ids.shape[1], device=a.seeds.device)
    seeds, positions = a.seeds[:, None], a.positions[:, None]
    if a.rule_name == "block":
        return uniform(seeds, positions, ACCEPT, drafts)
    return uniform(seeds, positions + drafts, ACCEPT, torch.zeros_like(drafts))


def draw_uniforms(a: ChainArguments, num_accepted: Tensor) -> Tensor:
    """[B] float64, by which the recovered or bonus token is drawn."""
    if a.uniforms is not None:
        return a.uniforms[:, -1]
    return uniform(a.seeds, a.positions + num_accepted, RESIDUAL, torch.zeros_like(a.seeds))
