"""The loops of the CUDA kernels issue no more instructions than bench/sass/budgets.py allows.

The figures are read from the machine code in `_C.so`, or from the sources if these are newer. Each
is compared from both sides, so that a change of how bench.sass counts is seen too.
"""

from __future__ import annotations

import pytest

import specdec_kernels
from bench.sass import budgets
from bench.sass.kernels import (
    NVCC,
    blocks_per_multiprocessor,
    cubins,
    library_is_current,
    read_kernels,
    shared_bytes,
)
from bench.sass.loops import find_loops

pytestmark = pytest.mark.build

needs_nvcc = pytest.mark.skipif(not NVCC, reason="needs nvcc")


@pytest.fixture(scope="module")
def kernels():
    """The kernels of this project, from the library if it was built from these sources."""
    library = specdec_kernels.has_cuda_kernels() and library_is_current()
    if not library and not NVCC:
        pytest.skip("needs nvcc, or a library with CUDA kernels that is newer than their sources")
    with cubins(budgets.SOURCES, library=library) as files:
        return [kernel for file in files for kernel in read_kernels(file, budgets.NAMES)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return shared_bytes(tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize(
    "budget", budgets.LOOPS, ids=lambda b: f"{budgets.NAMES[b.kernel]}: {b.work.name}"
)
def test_a_loop_keeps_to_its_ceiling(kernels, budget):
    found = [kernel.code for kernel in kernels if budget.kernel in kernel.code.name]
    most = max(find_loops(code, budget.work)[0].per_512 for code in found)
    # With room below its ceiling, a loop could become slower unseen.
    assert budget.ceiling - 1 < most <= budget.ceiling


@needs_nvcc
@pytest.mark.parametrize("budget", budgets.KERNELS, ids=lambda b: budgets.NAMES[b.kernel])
def test_a_kernel_keeps_to_its_ceilings(kernels, budget, shared):
    found = [kernel for kernel in kernels if budget.kernel in kernel.code.name]
    assert found
    for kernel in found:
        assert kernel.registers <= budget.registers
        assert blocks_per_multiprocessor(kernel.registers, shared) >= budget.least_blocks
        assert kernel.code.size <= budget.code_kib * 1024
        assert kernel.stack == kernel.local_accesses == 0
