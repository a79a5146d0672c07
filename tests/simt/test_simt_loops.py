"""The loops over whole warp tiles, where they hand a tile to the general code and where they end.

Rows that begin at a multiple of 16 bytes go through loops for one dtype and purpose each, some
others through loops that shift what they load, and the rest through general code. All have to give
the same bits, and the tokens of the C++ kernels.
"""

from __future__ import annotations

import proofs
import pytest
import torch
from proofs import assert_outputs_close, assert_outputs_equal, chain_case, sample_case

# Three rounds of the warps of a block, an incomplete tile, and rows at odd addresses.
V = 512 * 8 * 3 + 77
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [
    case
    for dtype in DTYPES
    for case in (
        sample_case(2, V, dtype), chain_case(2, 3, V, dtype),
        chain_case(2, 3, V, dtype, kind="probs"), chain_case(1, 3, V, dtype, rule="lenient"),
    )
]  # fmt: skip


def changed(args, change):
    """The arguments with every tensor of rows changed in place, in a new place."""
    return [
        change(a.clone()) if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim() >= 2
        else a
        for a in args
    ]  # fmt: skip


def moved(rows, offset):
    """The same rows, `offset` elements behind a multiple of 16 bytes."""
    room = torch.empty(rows.numel() + 16, dtype=rows.dtype)
    start = (-room.data_ptr() % 16) // rows.element_size() + offset
    return room[start : start + rows.numel()].view(rows.shape).copy_(rows)


def outputs(simt, case, args):
    with simt.running(processors=0):
        return simt.op(case.op)(*args)


def assert_agrees(simt, case, args):
    got = outputs(simt, case, args)
    assert_outputs_close(case.op, got, proofs.providers(case.op)["cpp"](*args))


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loops_and_the_general_code_give_the_same_bits(simt, case):
    args = case.args()
    want = outputs(simt, case, changed(args, lambda rows: moved(rows, 0)))
    assert_outputs_close(case.op, want, proofs.providers(case.op)["cpp"](*args))
    for offset in (1, 2, 5):
        got = outputs(simt, case, changed(args, lambda rows, n=offset: moved(rows, n)))
        assert_outputs_equal(case.op, got, want)


@pytest.mark.parametrize("shift", [-3e9, -700.0, 900.0, 3e6, 3e9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_far_from_0_have_the_same_distribution(simt, dtype, shift):
    """The offset of a tile is a float: it is rounded, and too coarse where it is large."""
    if dtype is torch.float16 and abs(shift) > 60_000:
        shift /= 1e5
    for case in (sample_case(3, V, dtype), chain_case(2, 3, V, dtype)):
        assert_agrees(simt, case, changed(case.args(), lambda rows: (rows + shift).to(dtype)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, -0.0])
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("index", [600, 4096 + 5, V - 1])
def test_a_loop_hands_on_an_entry_that_is_not_valid(simt, kind, value, index):
    def put(rows):
        rows[-1, 1, index] = value
        return rows

    case = chain_case(2, 3, V, kind=kind)
    args = case.args()
    for i, rows in enumerate(args):
        if isinstance(rows, torch.Tensor) and rows.is_floating_point() and rows.dim() == 3:
            faulty = [put(a.clone()) if j == i else a for j, a in enumerate(args)]
            assert_agrees(simt, case, faulty)
