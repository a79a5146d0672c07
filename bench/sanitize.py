"""Calls every op on small cases, for compute-sanitizer to watch.

compute-sanitizer --tool racecheck python -m bench.sanitize
"""

from __future__ import annotations

import sys

import torch

import specdec_kernels as sk
from specdec_kernels import testing

# Past one tile of 4096 entries; more only costs time under the sanitizer.
MOST_ENTRIES = 4200
SHARE = 3  # every third case: each op, form and filter still comes by


def main(device: str = "cuda") -> int:
    """Calls the cases; the number of calls."""
    calls = 0
    for op, provider in sk.providers().items():
        if provider[device] == "none":
            print(f"{op}: no provider on {device}")
            continue
        cases = [c for c in testing.cases(op) if c.vocabulary <= MOST_ENTRIES]
        for case in cases[::SHARE]:
            getattr(torch.ops.specdec_kernels, op).default(*case.args(device))
            calls += 1
    if device == "cuda":
        torch.cuda.synchronize()
    return calls


if __name__ == "__main__":
    print(f"{main(*sys.argv[1:])} calls")
