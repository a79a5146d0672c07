"""Parts of csrc/cuda/row by themselves, with arguments that no call of an op can give."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from simt import emulator

NAN, INF = float("nan"), float("inf")
MASS = 1 << 40
# 300 tiles, more than a block has threads; the first two and the last three have no mass.
UNITS = [0, 0, *([MASS] * 295), 0, 0, 0]


@pytest.mark.parametrize(
    ("u", "tile"),
    [(0.0, 2), (0.5, 149), (1 - 2**-53, 296), (1e-300, 2)]
    + [(u, 2) for u in (-0.0, -(2.0**-1074), -0.5, -1e300, -INF)]
    + [(u, 296) for u in (1.0, 1.5, 1e300, INF, NAN)],
)
def test_a_draw_stays_in_the_row_whatever_the_uniform(simt, u, tile):
    """The ops refuse a uniform outside [0, 1); the draw does not depend on that."""
    chosen, before = simt.choose(UNITS, u)
    assert chosen == tile
    assert 0 <= before < MASS


def test_the_last_arrival_knows_itself_and_leaves_no_count(simt):
    launch, count = 0x123456789ABC, 5
    for before, skipping in itertools.product(
        (0, 5, emulator.ALL_ONES, 17 << 16 | 2), (None, 0, 3, 4)
    ):
        ticket = before
        for n in range(count):
            last, skipped, ticket = simt.arrive(ticket, launch, count, n == skipping)
            assert last == (n == count - 1)
            assert ticket & 0xFF == (0 if last else n + 1)
        assert ticket == 0
        assert skipped == (skipping is not None)
        assert simt.arrive(before, launch, 1, False) == (True, False, before)
        assert simt.arrive(before, launch, 1, True) == (True, True, before)


def test_a_limit_is_that_of_its_launch_and_only_falls(simt):
    launch, none = 0x123456789ABC, 0xFFFF
    for before in (0, emulator.ALL_ONES, (launch - 1) << 16 | 1):
        assert simt.limit(before, launch) == (none, before)
        got, word = simt.limit(before, launch, lower_to=7)
        assert got == 7
        assert simt.limit(word, launch, lower_to=9) == (7, word)
        assert simt.limit(word, launch, lower_to=2)[0] == 2
        assert simt.limit(word, launch, lower_to=none) == (7, word)
    assert simt.limit(0, launch, lower_to=70_000) == (none, 0)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("tiles", [1, 2, 256, 257, 512, 513, 1300])
def test_every_tile_counts_however_many_a_thread_has(simt, tiles):
    """A thread loads two at once, which is enough for rows of 262,144 entries."""
    for at in {0, tiles // 3, tiles - 2, tiles - 1} & set(range(tiles)):
        maxima = [-INF] * tiles
        maxima[at] = -3.5
        assert simt.largest(maxima) == -3.5
        maxima[at] = NAN
        assert math.isnan(simt.largest(maxima))
        units = [0] * tiles
        units[at] = MASS
        assert simt.choose(units, 0.5)[0] == at
    assert simt.choose([MASS] * tiles, 0.999)[0] == int(0.999 * tiles)


def rows_of_tiles(shift, spread):
    """Five tiles of logits about `shift`; the third holds the maximum, the fourth is masked."""
    generator = torch.Generator().manual_seed(5)
    row = torch.randn(512 * 4 + 100, generator=generator) * spread + shift
    row[1300] = row.max() + spread / 3
    row[1536:2048] = torch.finfo(torch.float32).min
    return row


# Of the logits. At temperature 1 the offsets are exact as floats, about 2^21 where they cease to
# be, and far beyond that.
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-3, 1e-30])
@pytest.mark.parametrize("shift", [0.0, -700.0, 1453635.0, -1453635.0, 3e6, -3e9, 1e30])
def test_masses_of_tiles_are_their_shares_of_the_distribution(simt, shift, temperature):
    """Whatever integers the offsets of the tiles are."""
    row = rows_of_tiles(shift, 3 * max(temperature, 1e-7))
    masses, log_sum = simt.measure(row, temperature)
    rate = (1 / torch.tensor(temperature)).clamp(max=torch.finfo(torch.float32).max)
    rate = (rate * 1.44269504088896341).clamp(max=torch.finfo(torch.float32).max).double()
    weights = torch.exp2((row.double() - row.max().double()) * rate)
    total = weights.sum().item()
    assert log_sum == pytest.approx(math.log(total), abs=1e-6)
    for mass, part in zip(masses, weights.split(512), strict=True):
        assert mass / sum(masses) == pytest.approx(part.sum().item() / total, rel=4e-6, abs=1e-12)


def test_a_draw_finds_every_point_of_tiles_on_different_scales(simt):
    """The offsets at temperature 1 are the integers next to the maxima over log 2."""
    maxima = [-3.0, 0.0, -40.0, -1.0, -INF]
    shifts = [3 + 4, 3 + 0, 3 + 58, 3 + 1, 0]  # a row of five tiles loses three bits
    units = [77 << 7, 5 << 3 | 7, (1 << 62) + 12345, 9 << 4 | 3, 0]
    masses = [u >> s for u, s in zip(units, shifts, strict=True)]
    assert masses == [77, 5, 2, 9, 0]
    at = 0
    for tile, mass in enumerate(masses):
        for rest in range(mass):
            u = (at + 0.5) / sum(masses)
            assert simt.choose(units, u, maxima) == (tile, rest << shifts[tile])
            at += 1


@pytest.mark.parametrize("weight", [1.0, 1 - 2**-24, 1 + 2**-23, 1 + 2**-20, 1.5])
def test_a_tile_of_weights_about_1_has_their_sum(simt, weight):
    """An approximate exponential of a number just below 0 may come out above 1."""
    assert simt.warp_mass(weight) == 512 * weight
