"""No CUDA kernel spills registers to memory or uses too many, by the report of the compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc/cuda").rglob("*.cu"))
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")
# At most so many registers a thread, so that a multiprocessor holds two blocks of 256 threads, and
# six of the kernels that only copy.
MOST_REGISTERS = 128
COPIES = {"append": 40, "truncate": 40}

pytestmark = [
    pytest.mark.cuda_compile,
    pytest.mark.skipif(not NVCC or not SOURCES, reason="needs nvcc and csrc/cuda"),
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
__global__ void indexes_a_local_array(int* x) {
  int v[64];
  for (int i = 0; i < 64; ++i) v[i] = x[i];
  for (int i = 0; i < 64; ++i) x[i] = v[63 - i];
  x[0] = v[x[64] & 63];
}
"""


@dataclass(frozen=True)
class Function:
    """The report of ptxas on one function; it counts registers only for kernels."""

    name: str
    target: str
    stack: int
    stores: int
    loads: int
    registers: int | None

    def faults(self, most_registers: int) -> list[str]:
        used = {
            "bytes of stack frame": self.stack,
            "bytes of spill stores": self.stores,
            "bytes of spill loads": self.loads,
        }
        found = [f"{n} {what}" for what, n in used.items() if n]
        if self.registers is not None and self.registers > most_registers:
            found.append(f"{self.registers} registers, more than {most_registers}")
        return [f"{self.name} for {self.target}: {fault}" for fault in found]


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_PROPERTIES = re.compile(
    r"Function properties for (\w+)\s+"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
    r"(?:ptxas info\s*: Used (\d+) registers)?"
)


def parse(report: str) -> list[Function]:
    """The functions of a report. What a kernel calls out of line has the target of that kernel."""
    target, found = "", []
    pattern = f"{_ENTRY.pattern}|{_PROPERTIES.pattern}"
    for match in re.finditer(pattern, report):
        _, at, name, *numbers = match.groups()
        if at:
            target = at
            continue
        stack, stores, loads, registers = numbers
        used = int(registers) if registers else None
        found.append(Function(name, target, int(stack), int(stores), int(loads), used))
    return found


def compile_report(source: Path, folder: Path, targets: list[str], *flags: str) -> str:
    code = [
        word
        for target in targets
        for word in ("-gencode", f"arch={target.replace('sm', 'compute')},code={target}")
    ]
    done = subprocess.run(
        [
            *(NVCC, "-std=c++17", "-O3", "-fmad=false", "-t", "2", "-Xptxas", "-v"),
            "-DSPECDEC_WITH_CUDA",
            *("-I", ROOT / "csrc/include", "-I", ROOT / "csrc", *code, *flags),
            *("-fatbin", "-o", folder / f"{source.stem}.fatbin", source),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def known_targets():
    """Those of TARGETS that this nvcc knows."""
    done = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True, check=True)
    return [target for target in TARGETS if target in done.stdout.split()]


@pytest.mark.parametrize(
    "source", SOURCES, ids=lambda source: f"{source.parent.name}-{source.stem}"
)
def test_no_kernel_spills(source, known_targets, tmp_path):
    functions = parse(compile_report(source, tmp_path, known_targets))
    kernels = [f for f in functions if f.registers is not None]
    written = re.findall(
        r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(", source.read_text()
    )
    assert written
    for target in known_targets:
        names = " ".join(f.name for f in kernels if f.target == target)
        missing = [name for name in written if name not in names]
        assert not missing, f"no report of {', '.join(missing)} for {target}"
    most = COPIES.get(source.stem, MOST_REGISTERS)
    faults = [fault for f in functions for fault in f.faults(most)]
    assert not faults, "\n".join(faults)


def test_a_spilling_kernel_is_rejected(tmp_path):
    source = tmp_path / "spilling.cu"
    source.write_text(SPILLING)
    functions = parse(compile_report(source, tmp_path, ["sm_90"], "-maxrregcount=24"))
    spills, indexes = (
        next(f for f in functions if name in f.name) for name in ("spills", "indexes")
    )
    assert spills.stores > 0
    assert spills.loads > 0
    assert indexes.stack > 0
    assert len(spills.faults(MOST_REGISTERS)) == 3
    assert len(spills.faults(8)) == 4
