"""Records what later measurements were made on: the device, its clocks, and how it shares work.

    python -m bench.plans [--out FOLDER]

Each fact adds a line to cuda-goals.jsonl at once: "machine" (device, driver, commit), "clocks" (by
nvidia-smi), "groups" (for each kernel, how many block groups of 1 to 8 blocks run at once) and
"launch" (for a batch of `verify_chain`, the plan by which groups share its rows, and the grid,
registers and shared memory that PyTorch's profiler saw).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import specdec_kernels as sk
from bench.goals import Line, keep
from bench.results import machine, output
from bench.stages import force

BATCHES = (1, 8, 32, 256)
CLOCKS = (
    *("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit"),
    *("temperature.gpu", "memory.total"),
)
SEEN = ("grid", "block", "registers per thread", "shared memory", "est. achieved occupancy %")
SIZES = range(1, 9)  # blocks of a group
MOST_BLOCKS = 32  # that any device runs at once on a multiprocessor
FEW = 8  # entries of a row where only the grid matters


def clocks() -> dict[str, str]:
    """Clocks, power and temperature of the device now, with their units; empty if not told."""
    query = f"--query-gpu={','.join(CLOCKS)}"
    told = output("nvidia-smi", "--format=csv,noheader", query, "-i", "0") or ""
    return dict(zip(CLOCKS, told.split(", "), strict=False)) if told else {}


def last_plan(library: Any = torch.ops.specdec_kernels) -> dict[str, int]:
    """The plan of this thread's last launch, by the names of `CudaPlan`."""
    op = library.last_cuda_schedule.default
    names = [value.name for value in op._schema.returns]
    return dict(zip(names, op(), strict=True))


def groups_at_once(
    call: Callable[[], Any], sequences: int, library: Any = torch.ops.specdec_kernels
) -> list[int]:
    """How many groups of each of SIZES the launcher runs at once; 0 for sizes it does not have.

    call: calls the kernel for so many sequences, more than there can be groups.
    """
    found = []
    for size in SIZES:
        force("lazy", size, library)
        try:
            call()
        finally:
            force("auto", 0, library)
        plan = last_plan(library)
        if plan["groups"] >= sequences:
            raise ValueError(f"sequences must be more than the groups, got {sequences}")
        found.append(plan["groups"] if plan["group_size"] == size else 0)
    return found


def calls(sequences: int, device: str) -> dict[str, Callable[[], Any]]:
    """For each kernel that plans its launches, a call on rows of a few entries."""
    logits = torch.zeros(sequences, 2, FEW, device=device)
    probs, draft = logits.softmax(-1), logits[:, 1:]
    tokens = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
    tree = sk.Tree(tokens, torch.full_like(tokens, -1))
    noise = {"seeds": tokens[:, 0], "positions": tokens[:, 0]}
    return {
        "sample": lambda: sk.sample(logits[:, 0], **noise),
        "verify_chain, logits": lambda: sk.verify_chain(logits, tokens, draft, **noise),
        "verify_chain, probs": lambda: sk.verify_chain(
            probs, tokens, probs[:, 1:], kind="probs", **noise
        ),
        "verify_chain, general": lambda: sk.verify_chain(logits, tokens, draft, top_k=2, **noise),
        "verify_tree": lambda: sk.verify_tree(logits, tree, rule="target_only", **noise),
    }


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
    return launched(events)


def launched(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The launches of `chain_kernel` in a trace."""
    found = []
    for event in events:
        if event.get("cat") == "kernel" and "chain_kernel" in event.get("name", ""):
            seen = {key: event["args"][key] for key in SEEN if key in event.get("args", {})}
            kernel = re.search(r"\bchain_kernel(<.*?>(?=\())?", event["name"])
            found.append({"kernel": kernel[0] if kernel else "", **seen})
    return found


def lines() -> Iterator[Line]:
    """The records of the CUDA device at hand."""
    yield {"machine": machine("cuda")}
    yield {"clocks": clocks()}
    sequences = MOST_BLOCKS * torch.cuda.get_device_properties().multi_processor_count + 1
    for kernel, call in calls(sequences, "cuda").items():
        yield {"groups": {"kernel": kernel, "of_size": groups_at_once(call, sequences)}}
    for batch in BATCHES:
        seen = launches(batch)
        yield {"launch": {"batch": batch, "plan": last_plan(), "seen": seen}}


def main(
    out: Annotated[Path, typer.Option(help="Folder of the file.")] = Path("bench/results"),
) -> None:
    """Write down the device and its plans."""
    out.mkdir(parents=True, exist_ok=True)
    for line in lines():
        keep(out / "cuda-goals.jsonl", line)


if __name__ == "__main__":
    typer.run(main)
