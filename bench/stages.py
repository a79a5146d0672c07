"""Times parts of the CUDA kernels alone: reading rows, the two schedules, sizes of block groups.

Single sequences are also timed without emptying the L2 cache, which then holds rows and code: the
rows of one are few, so that the difference is mostly the time in which its code comes from memory.

    python -m bench.stages [--out FOLDER] [--budget 25]

Each point adds a line {"stage": ...} to cuda-goals.jsonl at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import specdec_kernels as sk
from bench import measure
from bench.configs import BASE, Config, build
from bench.goals import Line, keep
from bench.peers import PEERS
from specdec_kernels.arguments.rules import SCHEDULES

ROWS = (1, 8, 32, 512)
VOCABULARY = 151936
OURS = {peer.name: peer for peer in PEERS if peer.ours}


def force(schedule: str, group: int, library: Any = torch.ops.specdec_kernels) -> None:
    library.set_cuda_schedule(SCHEDULES.index(schedule), group)


def sampling(rows: int, device: str, vocabulary: int = VOCABULARY) -> Callable[[], Any]:
    """A call that reads each of some rows once."""
    logits = torch.randn(rows, vocabulary, device=device).bfloat16()
    seeds = torch.arange(rows, device=device)
    return lambda: sk.sample(logits, seeds=seeds, positions=seeds)


def timed(f: Callable[[], Any], device: str, seconds: float, *, flushed: bool = True) -> float:
    """Microseconds of a call, the median."""
    f()
    measure.sync(device)
    found = measure.rounds({"call": f}, device, budget=seconds, flushed=flushed)
    return statistics.median(found["call"])


def shared() -> list[tuple[Config, str, int]]:
    """Configs, schedules and sizes of block groups; 0 lets the launcher choose."""
    base = BASE["cuda"]
    probs = [replace(base, batch=b, dtype="float32", start="probs") for b in (1, 16)]
    logits = [replace(base, batch=b) for b in (1, 8, 16, 24, base.batch)]
    return [
        *((config, schedule, 0) for config in logits for schedule in ("lazy", "parallel")),
        *((config, "auto", group) for config in probs for group in (0, 4)),
        *((base, "lazy", group) for group in (1, 2, 4, 8)),
    ]


def stages(device: str, provider: str, seconds: float, rows: tuple[int, ...]) -> Iterator[Line]:
    for count in rows:
        us = timed(sampling(count, device), device, seconds)
        read = count * VOCABULARY * 2
        yield {"stage": {"op": "sample", "rows": count, "us": us, "bytes_per_s": read / us * 1e6}}
    for config, schedule, group in shared():
        call = OURS[provider].build(build(config, device))
        force(schedule, group)
        try:
            us = timed(call, device, seconds)
        finally:
            force("auto", 0)
        forced = {"schedule": schedule, "group": group}
        yield {"stage": {"op": "verify_chain", "config": config.id, **forced, "us": us}}
    for config in dict.fromkeys(config for config, _, _ in shared() if config.batch == 1):
        call = OURS[provider].build(build(config, device))
        for flushed in (True, False):
            us = timed(call, device, seconds, flushed=flushed)
            cache = {"cache": "emptied" if flushed else "kept"}
            yield {"stage": {"op": "verify_chain", "config": config.id, **cache, "us": us}}


def main(
    out: Annotated[Path, typer.Option(help="Folder of the file.")] = Path("bench/results"),
    seconds: Annotated[float, typer.Option(help="For each point.")] = 0.5,
    budget: Annotated[float, typer.Option(help="Seconds after which no point begins.")] = 25.0,
) -> None:
    """Time the stages one after the other."""
    begin = time.monotonic()
    for line in stages("cuda", "cuda", seconds, ROWS):
        keep(out / "cuda-goals.jsonl", line)
        if time.monotonic() - begin > budget:
            keep(out / "cuda-goals.jsonl", {"left_out": {"reason": f"{budget:g} s were spent"}})
            break


if __name__ == "__main__":
    typer.run(main)
