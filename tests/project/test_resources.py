"""No CUDA kernel in the library spills registers to memory or uses too many of them.

The figures are read from the machine code in `_C.so`, so the test sees the kernels that users get.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton

import specdec_kernels

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "specdec_kernels/_C.so"
SOURCES = sorted((ROOT / "csrc/cuda").rglob("*.cu"))
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
# nvcc knows the last two from 12.8 on.
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")
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

SPILLING = """
__global__ void spills(float* x) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[i] = x[i * 64 + threadIdx.x];
  for (int k = 0; k < 64; ++k) {
    #pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 7) % 64] + x[k];
  }
  for (int i = 0; i < 64; ++i) x[i * 64 + threadIdx.x] = v[i];
}
__device__ __noinline__ int indexed(int* x) {
  int v[64];
  for (int i = 0; i < 64; ++i) v[i] = x[i];
  for (int i = 0; i < 64; ++i) x[i] = v[63 - i];
  return v[x[64] & 63];
}
__global__ void indexes_a_local_array(int* x) { x[0] = indexed(x); }
__global__ void fits(int* x) { x[0] = 1; }
"""


@dataclass(frozen=True)
class Kernel:
    """The resources of one kernel; spilled registers are a part of the stack of a thread."""

    name: str
    target: str
    registers: int
    stack: int

    def faults(self, most_registers: int) -> list[str]:
        found = [f"{self.stack} bytes of stack"] if self.stack else []
        if self.registers > most_registers:
            found.append(f"{self.registers} registers, more than {most_registers}")
        return [f"{self.name} for {self.target}: {fault}" for fault in found]


_LINE = re.compile(r"arch = (\w+)|Function (\w+):\s+REG:(\d+) STACK:(\d+)")


def kernels_of(binary: Path) -> list[Kernel]:
    """The kernels in a library or fat binary, by Triton's copy of cuobjdump."""
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    target, found = "", []
    for match in _LINE.finditer(report):
        arch, name, registers, stack = match.groups()
        if arch:
            target = arch
        else:
            found.append(Kernel(name, target, int(registers), int(stack)))
    return found


def test_no_kernel_spills():
    kernels = kernels_of(LIBRARY)
    written = [
        name
        for source in SOURCES
        for name in re.findall(
            r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", source.read_text()
        )
    ]
    assert written
    targets = {kernel.target for kernel in kernels}
    assert targets <= set(TARGETS)
    assert targets >= set(TARGETS[:2])
    for target in targets:
        names = " ".join(kernel.name for kernel in kernels if kernel.target == target)
        missing = [name for name in written if name not in names]
        assert not missing, f"no {', '.join(missing)} for {target}"
    faults = []
    for kernel in kernels:
        most = next((n for name, n in COPIES.items() if name in kernel.name), MOST_REGISTERS)
        faults += kernel.faults(most)
    assert not faults, "\n".join(faults)


@pytest.mark.skipif(not NVCC, reason="needs nvcc")
def test_a_spilling_kernel_is_rejected(tmp_path):
    (tmp_path / "spilling.cu").write_text(SPILLING)
    subprocess.run(
        [NVCC, "-arch=sm_90", "-maxrregcount=24", "-fatbin", "spilling.cu"],
        cwd=tmp_path,
        check=True,
    )
    kernels = kernels_of(tmp_path / "spilling.fatbin")
    spills, indexes, fits = (
        next(kernel for kernel in kernels if name in kernel.name)
        for name in ("spills", "indexes", "fits")
    )
    assert len(spills.faults(MOST_REGISTERS)) == 1
    assert len(spills.faults(8)) == 2
    assert len(indexes.faults(MOST_REGISTERS)) == 1
    assert not fits.faults(MOST_REGISTERS)
