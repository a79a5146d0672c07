"""The CUDA source of `verify_tree`, run on the CPU by the SIMT emulator.

Every case has to agree with the C++ kernels, and give the same bits for every
number of blocks that share a row, every order of threads and any workspace. test_simt_ops.py has
the terms.
"""

from __future__ import annotations

import functools

import proofs
import pytest
import torch
from proofs import assert_outputs_close, assert_outputs_equal, tree_case
from simt import emulator
from support.providers import verify_tree

CASES = proofs.cases("verify_tree", heavy=True)
# Small enough for every order of threads.
SMALL = [case for case in CASES if case.vocabulary <= 131]
# More tiles than eight blocks take at once, an incomplete last tile, and rows at odd addresses.
V = 40_001
LARGE = [
    tree_case(1, 5, V, rows="shared", layout="sliced"),
    tree_case(1, 5, V, torch.bfloat16, rule="multi_draft_wor", rows="shared", filters="tensor"),
    tree_case(2, 4, V, rule="traversal", kind="probs", rows="flat"),
    tree_case(1, 4, V, torch.float16, rule="k_seq", draft="wide", rows="shared"),
    tree_case(1, 5, V, rule="top_k_plus_one", draft="mapped", rows="shared"),
]
PROCESSORS = (0, 3, 1000)  # one block for each row, up to one for every eight tiles


def outputs(simt, args, **running):
    with simt.running(**running):
        return simt.op("verify_tree")(*args)


@functools.cache
def of_whole_rows(simt, case):
    """The outputs where one block reads a row, one after the other, which all others equal."""
    return outputs(simt, case.args(), processors=0)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_agrees_with_the_cpu_kernels(simt, case):
    args = case.args()
    want = proofs.providers("verify_tree")["cpp"](*args)
    assert_outputs_close("verify_tree", outputs(simt, args), want)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(c, marks=[] if i % 3 else pytest.mark.full) for i, c in enumerate(SMALL)),
        *(
            pytest.param(c, marks=[] if i in (1, 2) else pytest.mark.full)
            for i, c in enumerate(LARGE)
        ),
    ],
    ids=str,
)
def test_splits_of_rows_change_no_bit_of_a_tree(simt, case):
    args, want = case.args(), of_whole_rows(simt, case)
    for processors in PROCESSORS[1:]:
        got = outputs(simt, args, processors=processors)
        assert_outputs_equal("verify_tree", got, want)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("order", list(emulator.ORDERS)[1:])
@pytest.mark.parametrize("case", [*SMALL, LARGE[0]], ids=str)
def test_every_order_of_threads_gives_the_same_bits(simt, case, order):
    got = outputs(simt, case.args(), processors=16, order=order)
    assert_outputs_equal("verify_tree", got, of_whole_rows(simt, case))


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("fill", [0, 131_073, 0x3F80_3F80_3F80_3F80])
@pytest.mark.parametrize("case", SMALL[::3] + LARGE, ids=str)
def test_the_workspace_may_hold_anything(simt, case, fill):
    got = outputs(simt, case.args(), processors=16, fill=fill)
    assert_outputs_equal("verify_tree", got, of_whole_rows(simt, case))


@pytest.mark.parametrize(
    ("rule", "n"),
    [
        *(("target_only", 1), ("multi_draft_wor", 31), ("traversal", 32), ("traversal", 33)),
        *(("multi_draft_wor", 700), pytest.param("traversal", 700, marks=pytest.mark.full)),
    ],
)
def test_a_tree_may_have_more_nodes_than_a_block_has_threads(simt, rule, n):
    case = tree_case(1, n, 23, rule=rule, rows="shared", draft="sparse", acceptance=0.3)
    args = case.args()
    want = proofs.providers("verify_tree")["cpp"](*args)
    for processors in PROCESSORS if n < 100 else PROCESSORS[1:2]:
        got = outputs(simt, args, processors=processors, order="seed-1")
        assert_outputs_close("verify_tree", got, want)


def test_the_factor_of_k_seq_is_that_of_all_siblings(simt):
    """rho is computed from the acceptance probability P(x) / (rho * Q(x)) of the first of four."""
    p, uniforms = torch.tensor([0.1, 0.1, 0.4, 0.4]), torch.full((1, 9), 0.999).double()
    got = verify_tree(
        simt.op("verify_tree"), p.expand(1, 5, 4), torch.arange(4)[None], torch.full((1, 4), -1),
        torch.full((1, 4, 4), 0.25), kind="probs", rule="k_seq", uniforms=uniforms,
    )  # fmt: skip
    rho = 0.1 / 0.25 / float(got[5][0, 0])
    beta = sum(min(0.25, x / rho) for x in p.tolist())
    assert 1 < rho < 1.6
    assert 1 - (1 - beta) ** 4 == pytest.approx(rho * beta, abs=1e-5)
