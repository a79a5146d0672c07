"""The kernels of this project for sm_90: where their machine code comes from, and what it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import triton

from bench.sass.code import Code, read_code
from bench.sass.loops import opcode

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "specdec_kernels/_C.so"
HEADERS = ("csrc/cuda", "csrc/include")
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
# What CMakeLists.txt gives nvcc in a release build.
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-fmad=false", "-Icsrc", "-Icsrc/include")
TARGET = "sm_90"
THREADS = 256  # of a block, as kThreads in csrc/cuda/thread_block.cuh


@dataclass(frozen=True)
class Kernel:
    """A kernel and what one block of it needs.

    registers: of a thread.
    stack: bytes of a thread; spilled registers are a part of it.
    """

    code: Code
    registers: int
    stack: int

    @property
    def local_accesses(self) -> int:
        """Instructions that read or write a thread's stack, such as those for spilled registers."""
        return sum(
            opcode(instruction) in ("LDL", "STL")
            for block in self.code.blocks.values()
            for instruction in block.instructions
        )


def blocks_per_multiprocessor(registers: int, shared_bytes: int, threads: int = THREADS) -> int:
    """How many blocks of sm_90 run at once on a multiprocessor, as NVIDIA's calculator says.

    registers: of a thread; they are given to a warp in units of 256, out of the 16384 of each of
        the four schedulers.
    shared_bytes: of a block; the system takes 1 KiB more, out of 228 KiB.
    """
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = 16384 // of_warp * 4 // warps
    by_shared = 233472 // (-(-(shared_bytes + 1024) // 128) * 128)
    return min(by_registers, by_shared, 64 // warps, 32)


def compiled(source: Path, folder: Path) -> Path:
    """The cubin of a source, made by nvcc with the flags of a release build."""
    if not NVCC:
        raise FileNotFoundError("nvcc is not on the PATH and not in /usr/local/cuda/bin")
    cubin = folder / f"{source.stem}.cubin"
    command = [NVCC, f"-arch={TARGET}", *FLAGS, "-cubin", "-o", cubin, source.resolve()]
    subprocess.run(command, cwd=ROOT, check=True)
    return cubin


@contextmanager
def cubins(sources: Sequence[str], *, library: bool) -> Iterator[list[Path]]:
    """The cubins of the library for sm_90, or of some sources in csrc/cuda compiled now."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if library:
            tool = triton.knobs.nvidia.cuobjdump.path
            command = [tool, "-xelf", TARGET, LIBRARY]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            yield sorted(folder.glob("*.cubin"))
        else:
            yield [compiled(ROOT / "csrc/cuda" / source, folder) for source in sources]


def library_is_current() -> bool:
    """Whether the library is newer than all sources of CUDA kernels."""
    files = (path for folder in HEADERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return LIBRARY.exists() and LIBRARY.stat().st_mtime > max(p.stat().st_mtime for p in files)


def shared_bytes(folder: Path) -> int:
    """The shared memory in which a block selects, beside some hundred bytes, as it is laid out."""
    source = folder / "shared.cu"
    source.write_text(
        '#include "cuda/row/select.cuh"\n'
        "__device__ char shared_bytes[sizeof(specdec::cuda::Candidates) + 1024];\n"
    )
    report = _resource_report(compiled(source, folder))
    return int(re.search(r"GLOBAL:(\d+)", report)[1])  # type: ignore[index]


def read_kernels(cubin: Path, names: Iterable[str] | None = None) -> list[Kernel]:
    """All kernels of a cubin; none where `names` are given and no kernel's name contains one."""
    needs = {
        name: (int(registers), int(stack))
        for name, registers, stack in re.findall(
            r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", _resource_report(cubin)
        )
    }
    if names is not None and not any(part in name for name in needs for part in names):
        return []  # to read all of a large library would take long
    codes = read_code(triton.knobs.nvidia.nvdisasm.path, cubin)
    return [Kernel(code, *needs[code.name]) for code in codes]


def _resource_report(cubin: Path) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
