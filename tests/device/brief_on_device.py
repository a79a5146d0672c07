"""Twenty cases of `sample` and `verify_chain`: what bench/gpu.sh checks before it times."""

from __future__ import annotations

import proofs
import pytest
from device.on_device import CASES, LARGE, on_device, schedule
from proofs import assert_outputs_close

import specdec_kernels as sk

__all__ = ["schedule"]  # a fixture

BRIEF = [*CASES[:: len(CASES) // 13][:13], *LARGE]

pytestmark = pytest.mark.skipif(not sk.has_cuda_kernels(), reason="_C.so has no CUDA kernels")


@pytest.mark.parametrize("case", BRIEF, ids=str)
def test_cuda_agrees_with_the_cpu_under_every_schedule(case, schedule):
    want = proofs.providers(case.op)["cpp"](*case.args())
    for forced in (("auto", 0), ("lazy", 8), ("parallel", 8)):
        schedule(*forced)
        assert_outputs_close(case.op, on_device("cuda", case), want)
