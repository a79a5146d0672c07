"""Launches kernels on the GPU before anything else is tried.

    python -m bench.smoke

That `_C.so` holds CUDA kernels does not show that the driver and the device can run them.
"""

from __future__ import annotations

import platform
from typing import Annotated

import proofs
import torch
import typer

import specdec_kernels as sk

OPS = ("sample", "verify_chain", "verify_tree", "kv_append_")


def launch(op: str, device: str) -> None:
    """Call an op on its first case, and wait; raises if the device cannot run it."""
    case = proofs.cases(op)[0]
    got = getattr(torch.ops.specdec_kernels, op).default(*case.args(device))
    outputs = got if isinstance(got, (list, tuple)) else [got]
    for tensor in outputs:
        if isinstance(tensor, torch.Tensor):
            tensor.cpu()
    if device == "cuda":
        torch.cuda.synchronize()


def main(device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda") -> None:
    """Launch a kernel of each kind."""
    print(f"python {platform.python_version()}, torch {torch.__version__}", flush=True)
    for op in OPS:
        launch(op, device)
        print(f"{op} runs on {device}, served by {sk.providers()[op][device]}", flush=True)


if __name__ == "__main__":
    typer.run(main)
