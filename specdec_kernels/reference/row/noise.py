"""The random numbers of every op, in float64: a function of (seed, position) and nothing else.

A *noise stream* is an independent source of noise: one stream each for acceptance uniforms, for
recovered and bonus tokens, for drafting, and for the noise that drafter and target share. See
docs/rules.md#noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ACCEPT, RESIDUAL, DRAFT, SHARED = range(4)
TAIL = 256  # stream + TAIL gives 32 more bits for words whose top 24 bits are 0


def philox(seed: int, counter: int, position: int, stream: int) -> tuple[int, int, int, int]:
    """Four 32-bit words of Philox4x32-10 (Salmon et al. 2011) with the seed as its key.

    The four counter words are (counter, position low, position high, stream).
    """
    mask = 0xFFFFFFFF
    c = [counter & mask, position & mask, (position >> 32) & mask, stream]
    key = [seed & mask, (seed >> 32) & mask]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c[0], c[1], c[2], c[3]


def uniform(seed: int, position: int, stream: int, counter: int = 0) -> float:
    """A uniform of 53 bits in [0, 1), from words 0 (low) and 1 (high)."""
    words = philox(seed, counter, position, stream)
    return ((words[0] | words[1] << 32) >> 11) * 2.0**-53


def exponentials(seed: int, position: int, stream: int, size: int) -> Tensor:
    """[size] float64 unit exponentials, from which Gumbel noise is `-log`.

    Token v takes word v % 4 of counter v // 4. A word whose top 24 bits are 0 is extended by 32
    more bits, so that tokens far in the tail of a distribution keep their probability.
    """
    out = torch.empty(size, dtype=torch.float64)
    for v in range(size):
        x = philox(seed, v // 4, position, stream)[v % 4]
        u = (x + 0.5) * 2.0**-32
        if x < 256:
            more = philox(seed, v // 4, position, stream + TAIL)[v % 4]
            u = (x * 2.0**32 + more + 0.5) * 2.0**-64
        out[v] = -math.log1p(-u)
    return out
