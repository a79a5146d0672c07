"""FlashInfer's kernel without its package, for machines to which only its headers were carried.

    python -m bench.peers.flashinfer_headers

compiles `flashinfer_chain.cu` for the GPU at hand. FlashInfer's `include/flashinfer` has to lie in
`.carry/flashinfer/include`, or in the folder that SPECDEC_FLASHINFER names.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.configs import Inputs
from bench.peers.base import Peer, Unsupported

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("flashinfer_chain.cu")
LIBRARY = ROOT / "build/flashinfer_chain.so"


def headers() -> Path:
    """The folder that holds `flashinfer/sampling.cuh`."""
    return Path(os.environ.get("SPECDEC_FLASHINFER") or ROOT / ".carry/flashinfer/include")


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

if __name__ == "__main__":
    build()
    print(f"compiled {LIBRARY}")
