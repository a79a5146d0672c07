"""The CUDA source of `ngram_propose`, run on the CPU by the SIMT emulator."""

from __future__ import annotations

import proofs
import pytest
import torch
from proofs.history import ngram_case
from support import simt_ops
from support.providers import assert_outputs_equal

OP = "ngram_propose"
CASES = [*proofs.cases(OP), ngram_case(2, 9000, 300, ids=50, lengths="full")]

pytestmark = pytest.mark.skipif(
    not simt_ops.available, reason="needs g++ and the sources of the CUDA kernels"
)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("order", simt_ops.ORDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_reference_in_every_order_of_threads(simt, case, order):
    torch.use_deterministic_algorithms(True)
    with simt.sharing(order=order):
        got = simt.op(OP)(*case.args())
    assert_outputs_equal(OP, got, proofs.providers(OP)["reference"](*case.args()))


@pytest.mark.full
def test_more_sequences_than_the_grid_holds(simt):
    """A grid has at most 65536 blocks."""
    n = 65_538
    history = torch.tensor([[1, 2, 1]]).repeat(n, 1)
    history[:, 1] = torch.arange(n)
    tokens, counts = simt.op(OP)(history, torch.full((n,), 3), 1, 1, 1)
    wanted = torch.where(history[:, 1] == 1, 1, torch.arange(n))
    assert tokens[:, 0].equal(wanted)
    assert (counts == 1).all()
