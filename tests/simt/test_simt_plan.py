"""How a launch of the CUDA kernels shares its work, on devices that are made up."""

from __future__ import annotations

import pytest
import torch
from proofs import chain_case

from bench import plans

TILES = 297  # of a row of 151,936 entries
SIZES = range(1, 9)


def device(*processors, sizes=SIZES):
    """A device whose GPU processing clusters have so many multiprocessors, each for two blocks.

    A group of blocks fits within one processing cluster. The result is as Library.plan takes it.
    """
    fit = {n: sum(2 * p // n for p in processors) for n in sizes}
    return (sum(processors), *(fit.get(n, 0) for n in SIZES))


# Dies of 132 multiprocessors: by chance some are cut off, and not as many in each cluster.
H200 = device(*[16] * 6, 18, 18)
DIES = {
    "32-groups-of-8": H200,
    "31-groups-of-8": device(*[18] * 4, 16, 16, 16, 12),
    "31-others": device(18, 18, 18, *[16] * 4, 14),
    "29-groups-of-8": device(*[18] * 5, 14, 14, 14),
}
A100 = device(108, sizes=[1])
OTHERS = {"small": device(10, 10), "one-cluster": device(7), "no-clusters": A100}


@pytest.mark.parametrize("die", [*DIES.values(), *OTHERS.values()], ids=[*DIES, *OTHERS])
def test_no_plan_has_more_groups_than_run_at_once_unless_rows_do(simt, die):
    for b in (1, 2, 5, 8, 16, 31, 32, 33, 64, 65, 133, 1000):
        plan = simt.plan(die, b, 6, TILES)
        assert die[plan.group_size] > 0
        assert plan.groups <= max(die[plan.group_size], 6 * b if plan.parallel else 0)


def test_rows_are_split_if_few_sequences_would_leave_the_device_idle(simt):
    assert [b for b in range(1, 65) if simt.plan(H200, b, 6, TILES).parallel] == list(range(1, 9))
    one = simt.plan(H200, 1, 6, TILES)
    assert (one.group_size, one.splits) == (8, 5)
    assert simt.plan(H200, 1000, 6, TILES).groups == 264
    assert simt.plan(A100, 32, 6, TILES) == (0, 32, 1, 1, 0)


def test_a_plan_does_not_overflow_the_ticket_counter(simt):
    with simt.sharing("parallel"):
        assert simt.plan(H200, 1, 65_536, TILES).parallel == 0
        plan = simt.plan(tuple(1000 * n for n in H200), 1, 16_383, TILES)
    assert plan.parallel
    assert 16_383 * plan.splits < 65_536


def test_the_plan_of_a_launch_has_the_names_of_the_structure(simt):
    case = chain_case(2, 2, 4097)
    with simt.sharing("parallel", 8):
        simt.op(case.op)(*case.args())
    assert plans.last_plan(torch.ops.specdec_kernels_simt) == simt.last_plan()._asdict()
    assert simt.last_plan().parallel
    assert simt.last_plan().group_size == 8
