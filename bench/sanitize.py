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

# Rows of more than one tile are needed, but larger ones only cost time under the sanitizer.
TILE, MOST_ENTRIES = 4096, 4200
SHARE = 9  # one case in so many is called, and every case of more than one tile


def _chosen(op: str) -> list[proofs.Case]:
    cases = [c for c in proofs.cases(op) if c.vocabulary <= MOST_ENTRIES]
    small = [c for c in cases if c.vocabulary <= TILE]
    return small[::SHARE] + [c for c in cases if c not in small]


def _in_turn(ops: list[str]) -> Iterator[tuple[str, proofs.Case]]:
    """(op, case): one of each op, then the next ones."""
    for calls in itertools.zip_longest(*([(op, c) for c in _chosen(op)] for op in ops)):
        yield from (call for call in calls if call)


def sanitize(device: str, budget: float) -> tuple[dict[str, int], int]:
    """(op -> calls made, calls that the budget left out)."""
    begin, left_out = time.monotonic(), 0
    served = {op: provider[device] for op, provider in sk.providers().items()}
    ops = [op for op, provider in served.items() if provider in ("cuda", "cpp")]
    print("not called:", ", ".join(op for op in served if op not in ops) or "none", flush=True)
    calls = dict.fromkeys(ops, 0)
    for op, case in _in_turn(ops):
        if time.monotonic() - begin > budget:
            left_out += 1
            continue
        getattr(torch.ops.specdec_kernels, op).default(*case.args(device))
        calls[op] += 1
        if device == "cuda":
            torch.cuda.synchronize()  # else the budget would count launches
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
