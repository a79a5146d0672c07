"""Philox4x32-10 (Salmon et al. 2011), and the uniforms and exponentials made of its words.

The key is the seed; the counter is (counter, position low, position high, noise stream).
docs/rules.md#noise has the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND_A = tl.constexpr(0xD2511F53)
ROUND_B = tl.constexpr(0xCD9E8D57)
KEY_A = tl.constexpr(0x9E3779B9)
KEY_B = tl.constexpr(0xBB67AE85)
# stream + TAIL gives 32 more bits for words whose top 24 bits are 0.
TAIL = tl.constexpr(256)

# Noise streams.
ACCEPT = tl.constexpr(0)
RESIDUAL = tl.constexpr(1)
SHARED = tl.constexpr(3)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds over uint32 tensors of one shape; the key may be scalar."""
    for _ in tl.static_range(10):
        high_a = tl.umulhi(c0, tl.full(c0.shape, ROUND_A, tl.uint32))
        high_b = tl.umulhi(c2, tl.full(c2.shape, ROUND_B, tl.uint32))
        low_a = c0 * tl.full(c0.shape, ROUND_A, tl.uint32)
        low_b = c2 * tl.full(c2.shape, ROUND_B, tl.uint32)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0 = k0 + tl.full(k0.shape, KEY_A, tl.uint32)
        k1 = k1 + tl.full(k1.shape, KEY_B, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words(counter, seed, position, stream: tl.constexpr):
    """Four words for each counter (uint32, any shape); seed and position are int64 scalars."""
    zero = counter * 0
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return philox(counter, zero + low, zero + high, zero + stream, k0, k1)


@triton.jit
def uniform(seed, position, stream: tl.constexpr):
    """A float64 scalar of 53 bits in [0, 1), from counter 0."""
    return counter_uniform(tl.full([], 0, tl.uint32), seed, position, stream)


@triton.jit
def counter_uniform(counter, seed, position, stream: tl.constexpr):
    """A float64 scalar of 53 bits in [0, 1), from a counter (uint32 scalar)."""
    w0, w1, _, _ = words(counter, seed, position, stream)
    # In int64 the pair shifted by 11 is at most 53 bits and converts exactly.
    pair = (w0.to(tl.int64) >> 11) | (w1.to(tl.int64) << 21)
    return pair.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def tile_words(tile, seed, position, stream: tl.constexpr, TILE: tl.constexpr):
    """[TILE] uint32: word v % 4 of counter v // 4 for the tokens v of one tile."""
    counter = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)
    w0, w1, w2, w3 = words(counter, seed, position, stream)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def token_words(tokens, seed, position, stream: tl.constexpr):
    """uint32: word v % 4 of counter v // 4 for some tokens v in any order."""
    w0, w1, w2, w3 = words((tokens // 4).to(tl.uint32), seed, position, stream)
    place = tokens % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def tile_exponentials(tile, seed, position, stream: tl.constexpr, TILE: tl.constexpr):
    """[TILE] unit exponentials of the tokens of one tile."""
    x = tile_words(tile, seed, position, stream, TILE)
    half = tl.full([TILE], 0.5, tl.float32)
    # One tile in 4096 needs more bits: the branch is nearly free.
    if tl.max((x < 256).to(tl.int32), 0) > 0:
        more = tile_words(tile, seed, position, stream + TAIL, TILE)
        half = tail_half(x, more)
    return exponentials(x, half)


@triton.jit
def token_exponentials(tokens, seed, position, stream: tl.constexpr):
    """Unit exponentials of some tokens, the same bits as those of their tiles."""
    x = token_words(tokens, seed, position, stream)
    return exponentials(x, tail_half(x, token_words(tokens, seed, position, stream + TAIL)))


@triton.jit
def tail_half(x, more):
    """What is added to a word x: 1/2, or a fraction of 32 more bits where its top 24 bits are 0."""
    return tl.where(x < 256, (more.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 0.5)


@triton.jit
def exponentials(x, half):
    """float32 unit exponentials -log1p(-u) with u in (2^-65, 1), see docs/rules.md#noise."""
    u = (x.to(tl.float32) + half) * (1.0 / 4294967296.0)
    # 1 - u, exact to its own last bit: u rounds to 1 where x is near 2^32.
    flipped = x ^ tl.full(x.shape, 0xFFFFFFFF, tl.uint32)
    rest = (flipped.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    # Below 1/16 the logarithm of a number near 1 has no relative precision; the series has.
    series = 1.0 / 5 + u * (1.0 / 6 + u * (1.0 / 7))
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * series))))
    return tl.where(x < 268435456, series, -tl.log(rest))
