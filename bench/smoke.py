"""Launches kernels on the GPU before anything else is tried, and says how they were launched.

    python -m bench.smoke [--launches]

That `_C.so` holds CUDA kernels does not show that the driver and the device can run them.
--launches also prints a line of JSON for each batch size: kernel, grid, block, registers and shared
memory of `verify_chain`, as the profiler of PyTorch saw them. How many blocks form a group it does
not tell.
"""

from __future__ import annotations

import json
import platform
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import proofs
import torch
import typer

import specdec_kernels as sk

OPS = ("sample", "verify_chain", "verify_tree", "kv_append_")
BATCHES = (1, 8, 32, 256)
SEEN = ("grid", "block", "registers per thread", "shared memory", "est. achieved occupancy %")


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


def launches(batch: int) -> list[dict[str, Any]]:
    """How `verify_chain` was launched for a batch of five drafts and 151936 tokens."""
    target = torch.randn(batch, 6, 151936, device="cuda").bfloat16()
    arguments = {
        "seeds": torch.arange(batch, device="cuda"),
        "positions": torch.zeros(batch, dtype=torch.int64, device="cuda"),
    }
    tokens = torch.zeros(batch, 5, dtype=torch.int64, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        sk.verify_chain(target, tokens, target[:, 1:], **arguments)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return launched(events, batch)


def launched(events: list[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """The launches of `chain_kernel` in a trace."""
    found = []
    for event in events:
        if event.get("cat") == "kernel" and "chain_kernel" in event.get("name", ""):
            seen = {key: event["args"][key] for key in SEEN if key in event.get("args", {})}
            kernel = re.search(r"\bchain_kernel(<.*?>(?=\())?", event["name"])
            found.append({"batch": batch, "kernel": kernel[0] if kernel else "", **seen})
    return found


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    show: Annotated[bool, typer.Option("--launches", help="Print grids and registers.")] = False,
) -> None:
    """Launch a kernel of each kind."""
    print(f"python {platform.python_version()}, torch {torch.__version__}", flush=True)
    for op in OPS:
        launch(op, device)
        print(f"{op} runs on {device}, served by {sk.providers()[op][device]}", flush=True)
    for batch in BATCHES if show else ():
        for line in launches(batch):
            print(json.dumps({"launch": line}), flush=True)


if __name__ == "__main__":
    typer.run(main)
