"""Parts of csrc/cuda/row by themselves, with arguments that no call of an op can give."""

from __future__ import annotations

import pytest
from support import simt_ops

pytestmark = pytest.mark.skipif(
    not simt_ops.available, reason="needs g++ and the sources of the CUDA kernels"
)

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


@pytest.mark.parametrize("weight", [1.0, 1 - 2**-24, 1 + 2**-23, 1 + 2**-20, 1.5])
def test_a_tile_of_weights_about_1_has_their_sum(simt, weight):
    """An approximate exponential of a number just below 0 may come out above 1."""
    assert simt.warp_mass(weight) == 512 * weight
