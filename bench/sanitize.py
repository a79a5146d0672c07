"""Calls the CUDA kernels on small cases, for compute-sanitizer to watch.

compute-sanitizer --tool racecheck python -m bench.sanitize [--budget 60]

Ops that Triton serves are left out: it takes seconds to compile the kernels of a case. The ops take
turns, so that each has been called when the budget is spent; what was not called is said.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Annotated

import proofs
import torch
import typer

import specdec_kernels as sk
from bench.stages import force

# Rows of more than one tile are needed, but larger ones only cost time under the sanitizer.
TILE, MOST_ENTRIES = 4096, 4200
# (schedule, blocks in a group); 0 chooses by size. Every SHARE-th case runs under one of them, and
# a case of more than one tile runs under all.
FORCED = (("auto", 0), ("lazy", 8), ("parallel", 8))
SHARE = 3
SCHEDULED = ("sample", "verify_chain", "verify_tree")


def _chosen(op: str, turn: int) -> list[proofs.Case]:
    """The cases of an op that run under schedule number `turn`."""
    cases = [c for c in proofs.cases(op) if c.vocabulary <= MOST_ENTRIES]
    small = [c for c in cases if c.vocabulary <= TILE]
    if op not in SCHEDULED:
        return small[::SHARE] if turn == 0 else []
    return small[turn * SHARE :: SHARE * len(FORCED)] + [c for c in cases if c not in small]


def _in_turn(ops: list[str]) -> Iterator[tuple[str, int, proofs.Case]]:
    """(op, number of the schedule, case): one of each op and schedule, then the next ones."""
    queues = [
        [(op, turn, c) for c in _chosen(op, turn)] for turn in range(len(FORCED)) for op in ops
    ]
    for calls in itertools.zip_longest(*queues):
        yield from (call for call in calls if call)


def sanitize(device: str, budget: float) -> tuple[dict[str, int], int]:
    """(op -> calls made, calls that the budget left out)."""
    begin, left_out = time.monotonic(), 0
    served = {op: provider[device] for op, provider in sk.providers().items()}
    ops = [op for op, provider in served.items() if provider in ("cuda", "cpp")]
    print("not called:", ", ".join(op for op in served if op not in ops) or "none", flush=True)
    calls = dict.fromkeys(ops, 0)
    try:
        for op, turn, case in _in_turn(ops):
            if time.monotonic() - begin > budget:
                left_out += 1
                continue
            force(*FORCED[turn])
            getattr(torch.ops.specdec_kernels, op).default(*case.args(device))
            calls[op] += 1
            if device == "cuda":
                torch.cuda.synchronize()  # else the budget would count launches
    finally:
        force(*FORCED[0])
    return calls, left_out


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    budget: Annotated[float, typer.Option(help="Seconds after which no case begins.")] = 60.0,
) -> None:
    """Call the cases, and say how often each op was called."""
    calls, left_out = sanitize(device, budget)
    for op, count in calls.items():
        print(f"{op}: {count} calls")
    if left_out:
        print(f"{left_out} of {sum(calls.values()) + left_out} calls left out: {budget:g} s spent")


if __name__ == "__main__":
    typer.run(main)
