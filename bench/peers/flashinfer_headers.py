"""FlashInfer's kernel without its package, for machines to which only its headers were carried.

    python -m bench.peers.flashinfer_headers --prepare
    python -m bench.peers.flashinfer_headers

The first command, where there is a network, unpacks the headers of FlashInfer's wheel (62 MB) into
`.carry/flashinfer/include`, 6 MB that Git ignores. The second one compiles `flashinfer_chain.cu`
against them for the GPU at hand. SPECDEC_FLASHINFER names another folder of headers.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from bench.configs import Inputs
from bench.peers.base import Peer, Unsupported

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("flashinfer_chain.cu")
LIBRARY = ROOT / "build/flashinfer_chain.so"
VERSION = "0.7.2.post1"
IN_WHEEL = PurePosixPath("flashinfer/data/include")
USED = "flashinfer/sampling.cuh"


def headers() -> Path:
    """The folder that holds USED."""
    return Path(os.environ.get("SPECDEC_FLASHINFER") or ROOT / ".carry/flashinfer/include")


def download(folder: Path) -> Path:
    """FlashInfer's wheel of VERSION, from where pip is set up to find packages."""
    pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:")
    subprocess.run([*pip, "--dest", folder, f"flashinfer-python=={VERSION}"], check=True)
    [wheel] = folder.glob("flashinfer_python-*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> int:
    """Write the headers of a wheel into a folder, and its license beside it; their number.

    Raises ValueError if USED is not among them.
    """
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        names = [PurePosixPath(name) for name in archive.namelist() if not name.endswith("/")]
        if IN_WHEEL / USED not in names:
            raise ValueError(f"the wheel must hold {IN_WHEEL / USED}, {wheel.name} does not")
        for name in names:
            if name.is_relative_to(IN_WHEEL):
                target = folder / name.relative_to(IN_WHEEL)
                count += 1
            elif name.name == "LICENSE" and name.parts[0].endswith(".dist-info"):
                target = folder.parent / name.name
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(str(name)))
    return count


def prepare() -> None:
    """Put the headers where a device looks for them; raises what pip or `unpack` raises."""
    with tempfile.TemporaryDirectory() as folder:
        count = unpack(download(Path(folder)), headers())
    print(f"{count} headers of FlashInfer {VERSION} are in {headers()}")


def command(nvcc: str, *options: str) -> list[str | Path]:
    """What compiles the library. Headers of CUDA may lie in packages of Python (cuRAND does)."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = [headers(), *sorted(packages.glob("*/include"))]
    includes = [f"-I{folder}" for folder in found]
    return [nvcc, "-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", *options, *includes, SOURCE]


def build() -> None:
    """Compile the library; raises if nvcc or a header is missing."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not nvcc:
        raise FileNotFoundError("nvcc is not on the PATH and not in /usr/local/cuda/bin")
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*command(nvcc, "-arch=native"), "-o", LIBRARY], check=True)


def _available(device: str) -> str:
    if device != "cuda":
        return "runs on cuda"
    return "" if LIBRARY.exists() else "not compiled: python -m bench.peers.flashinfer_headers"


def _call(inputs: Inputs) -> Callable[[], Any]:
    if inputs.config.start != "probs":
        raise Unsupported("takes probabilities")
    function = ctypes.CDLL(str(LIBRARY)).flashinfer_chain
    target, draft = inputs.target, inputs.draft
    b, gamma, vocab = draft.shape
    turns = itertools.cycle([(turn.tokens.int(), turn.seeds[:1]) for turn in inputs.turns])
    offset = torch.zeros(1, dtype=torch.int64, device=target.device)
    counts = torch.zeros(2, b, dtype=torch.int32, device=target.device)
    sizes = [ctypes.c_uint32(n) for n in (b, gamma, vocab)]

    def once() -> Tensor:
        drafted, seed = next(turns)
        tokens = torch.empty(b, gamma + 1, dtype=torch.int32, device=target.device)
        tensors = (draft, drafted, target, tokens, *counts)
        status = function(
            *(ctypes.c_void_p(t.data_ptr()) for t in tensors),
            *sizes,
            ctypes.c_void_p(seed.data_ptr()),
            ctypes.c_void_p(offset.data_ptr()),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if status != 0:
            raise RuntimeError(f"FlashInfer returned cudaError {status}")
        return tokens

    return once


def _accepted(tokens: Tensor) -> Tensor:
    """Accepted drafts of each sequence: all tokens but the last one, without the padding of -1."""
    return (tokens >= 0).sum(-1) - 1


PEERS = (Peer("flashinfer_headers", _available, _call, _accepted),)


def main(
    prepare_headers: Annotated[
        bool, typer.Option("--prepare", help="Download the headers instead; needs a network.")
    ] = False,
) -> None:
    """Compile FlashInfer's kernel for the GPU at hand."""
    if prepare_headers:
        prepare()
        return
    build()
    print(f"compiled {LIBRARY}")


if __name__ == "__main__":
    typer.run(main)
