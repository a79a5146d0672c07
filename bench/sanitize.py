"""Calls every op on small cases, for compute-sanitizer to watch.

compute-sanitizer --tool racecheck python -m bench.sanitize
"""

from __future__ import annotations

import sys

import proofs
import torch

import specdec_kernels as sk
from specdec_kernels.arguments.rules import SCHEDULES

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


def main(device: str = "cuda") -> dict[str, int]:
    """Call the cases on a device; returns the number of calls of each op."""
    calls: dict[str, int] = {}
    for op, provider in sk.providers().items():
        if provider[device] == "none":
            print(f"{op}: no provider on {device}")
            continue
        for turn, (schedule, group) in enumerate(FORCED):
            torch.ops.specdec_kernels.set_cuda_schedule(SCHEDULES.index(schedule), group)
            # Triton takes seconds to compile the kernels of a case.
            most = 1 if provider[device] == "triton" and op not in SCHEDULED else None
            for case in _chosen(op, turn)[:most]:
                getattr(torch.ops.specdec_kernels, op).default(*case.args(device))
                calls[op] = calls.get(op, 0) + 1
    torch.ops.specdec_kernels.set_cuda_schedule(SCHEDULES.index("auto"), 0)
    if device == "cuda":
        torch.cuda.synchronize()
    return calls


if __name__ == "__main__":
    for op, calls in main(*sys.argv[1:]).items():
        print(f"{op}: {calls} calls")
