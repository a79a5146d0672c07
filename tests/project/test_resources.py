"""No CUDA kernel in the library spills registers to memory or uses too many of them.

The figures are read from the machine code in `_C.so`, so the test sees the kernels that users get.
"""

import re
import subprocess
from typing import NamedTuple

import pytest
import triton
from support.sources import CSRC, ROOT

import specdec_kernels

TARGETS = {"sm_80", "sm_90", "sm_100", "sm_120"}  # nvcc knows the last two from 12.8 on
# At most so many registers a thread, so that a multiprocessor holds two blocks of 256 threads, and
# six of the kernels that only copy.
MOST_REGISTERS = 128
COPIES = {"append_kernel": 40, "lengths_kernel": 40}

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(
        not specdec_kernels.has_cuda_kernels(), reason="needs a library with CUDA kernels"
    ),
]


class Kernel(NamedTuple):
    """Bytes of the stack of a thread, of which spilled registers are a part, and its registers."""

    name: str
    target: str
    registers: int
    stack: int


def kernels_of(binary):
    """The kernels in a library or fat binary, by Triton's copy of cuobjdump."""
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line, target, found = r"arch = (\w+)|Function (\w+):\s+REG:(\d+) STACK:(\d+)", "", []
    for arch, name, registers, stack in re.findall(line, report):
        target = arch or target
        found += [Kernel(name, target, int(registers), int(stack))] if name else []
    return found


def test_no_kernel_spills():
    kernels = kernels_of(ROOT / "specdec_kernels/_C.so")
    defined = r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\("
    written = {n for p in CSRC.glob("cuda/**/*.cu*") for n in re.findall(defined, p.read_text())}
    targets = {kernel.target for kernel in kernels}
    assert written
    assert {"sm_80", "sm_90"} <= targets <= TARGETS
    for target in targets:
        names = " ".join(kernel.name for kernel in kernels if kernel.target == target)
        assert not [name for name in written if name not in names], target
    limits = {
        k: next((n for name, n in COPIES.items() if name in k.name), MOST_REGISTERS)
        for k in kernels
    }
    assert not [
        kernel for kernel, most in limits.items() if kernel.stack or kernel.registers > most
    ]
