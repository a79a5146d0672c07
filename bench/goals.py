"""Times the configs that have a performance target, and writes a line of JSON after each of them.

    python -m bench.goals [--device cuda] [--only cuda] [--out FOLDER] [--budget 80]
    python -m bench.goals --called t.8-k50-p.9

The file, DEVICE-goals.jsonl, is only added to: a run that is cut off leaves what it has measured. A
line holds one key: "machine", "row" (a row of bench.results), "left_out" or "failed";
`bench.stages` and `bench.turns` add others. --called times nothing: for a profiler to watch, it
calls the first goal with such filters twice, so that the second call finds its code loaded.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import measure, sweep
from bench.configs import HEADLINE, Config, build
from bench.peers import PEERS
from bench.results import Run, machine
from bench.workloads import WORKLOADS

Line = dict[str, Any]
# Sizes of a rehearsal.
SMALL: dict[str, Any] = {"batch": 2, "gamma": 3, "vocabulary": 1031}


def goals(device: str, *, small: bool) -> tuple[Config, ...]:
    """The configs with a target on a device; the goals of a GPU in a rehearsal's sizes."""
    if not small:
        return HEADLINE[device]
    return tuple(dict.fromkeys(dataclasses.replace(c, **SMALL) for c in HEADLINE["cuda"]))


def keep(path: Path, line: Line) -> None:
    """Add a line to the file and print it; it is on the disk when this returns.

    Numbers that are not finite become null, so that any reader of JSON takes the line.
    """
    text = json.dumps(_finite(line), allow_nan=False)
    with path.open("a") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(text, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines(
    configs: Iterable[Config], device: str, only: list[str], *, seconds: float, budget: float
) -> Iterator[Line]:
    """What is known after each config. `seconds` of a config go to timing, about."""
    begin = time.monotonic()
    run = Run({**machine(device), "op": "verify_chain"})
    yield {"machine": run.machine}
    present = []
    for peer in PEERS:
        reason = "not asked for" if peer.name not in only else peer.available(device)
        if not reason:
            present.append(peer)
        elif peer.name in only:
            yield {"left_out": {"provider": peer.name, "reason": reason}}
    work = dataclasses.replace(WORKLOADS["verify_chain"], peers=tuple(present))
    for config in configs if present else ():
        if time.monotonic() - begin > budget:
            yield {"left_out": {"config": config.id, "reason": f"{budget:g} s were spent"}}
            continue
        print(f"timing {config.id}", flush=True)  # the last such line tells where a run hangs
        skipped = len(run.skipped)
        try:
            rows = sweep.measure_config(config, work, run, device, seconds=seconds, compiled=False)
        except Exception as error:
            yield {"failed": {"config": config.id, "reason": f"{type(error).__name__}: {error}"}}
            continue
        for row in rows:
            yield {"row": dataclasses.asdict(row)}
        for left in run.skipped[skipped:]:
            yield {"left_out": left}


def call_twice(config: Config, device: str, provider: str) -> None:
    """Call a config twice; a profiler that waits to be started sees the second call."""
    peer = next(peer for peer in PEERS if peer.name == provider)
    call = peer.build(build(config, device))
    call()
    measure.sync(device)
    with torch.cuda.profiler.profile() if device == "cuda" else nullcontext():
        call()
        measure.sync(device)
    print(f"called {config.id}", flush=True)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    only: Annotated[list[str] | None, typer.Option(help="Peers; cuda by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the file.")] = Path("bench/results"),
    seconds: Annotated[float, typer.Option(help="For each config and way of timing.")] = 1.0,
    budget: Annotated[float, typer.Option(help="Seconds after which no config begins.")] = 80.0,
    called: Annotated[str, typer.Option(help="Filters of a goal that is only called.")] = "",
    small: Annotated[bool, typer.Option(help="Sizes of a rehearsal.")] = False,
) -> None:
    """Time the goal configs one after the other."""
    names, failed, measured = only or ["cuda"], 0, 0
    configs = goals(device, small=small)
    if called:
        call_twice(next(c for c in configs if c.filters == called), device, names[0])
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{device}-goals.jsonl"
    for line in lines(configs, device, names, seconds=seconds, budget=budget):
        keep(path, line)
        failed += "failed" in line
        measured += "row" in line
    raise typer.Exit(code=int(failed > 0 or measured == 0))


if __name__ == "__main__":
    typer.run(main)
