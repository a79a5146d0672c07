"""Bytes that ranks exchange to verify drafts over a sharded vocabulary: `python -m bench.sharded`.

Prints, for each rule, what one rank hands to collectives for one target row and how often it does,
beside gathering the logits of that row; and the median time of a call, beside that of gathering the
logits of target and draft and verifying them with `verify_chain`. The bytes are counted at
`torch.distributed`; gloo and NCCL get the same calls.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from specdec_kernels import verify_chain
from specdec_kernels.sharded import SHARDED_RULES, verify_chain_sharded

BATCH, GAMMA = 8, 5
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k, top-p, min-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
}


def counted(calls: list[int], name: str) -> Any:
    """A collective that notes the bytes of this rank's payload."""
    function = getattr(dist, name)

    def call(*given: Any, **options: Any) -> Any:
        payload = given[1] if name == "all_gather" else given[0]
        calls.append(payload.numel() * payload.element_size())
        return function(*given, **options)

    return call


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """The median time of a collective call, of which the first one does not count."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return 1000 * statistics.median(seconds[1:])


def gathered(shard: torch.Tensor, ranks: int) -> torch.Tensor:
    """Whole rows on every rank."""
    parts = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(parts, shard)
    return torch.cat(parts, -1)


def measure(rank: int, ranks: int, vocab: int, store: str, repeats: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    g = torch.Generator().manual_seed(rank)
    width = vocab // ranks
    target = torch.randn(BATCH, GAMMA + 1, width, generator=g)
    draft = torch.randn(BATCH, GAMMA, width, generator=g)
    drafted = torch.zeros(BATCH, GAMMA, dtype=torch.int64)
    seeds = positions = torch.arange(BATCH)
    rows = BATCH * (GAMMA + 1)
    whole = width * target.element_size()
    for rule in SHARDED_RULES:
        for name, parameters in SETTINGS.items():
            options: dict[str, Any] = dict(rule=rule, seeds=seeds, positions=positions)
            options |= parameters

            def sharded(options: dict[str, Any] = options) -> None:
                verify_chain_sharded(target, drafted, draft, **options)

            def unsharded(options: dict[str, Any] = options) -> None:
                rows = gathered(target, ranks)
                verify_chain(rows, drafted, gathered(draft, ranks), **options)

            calls: list[int] = []
            changed = {n: counted(calls, n) for n in ("all_reduce", "all_gather")}
            with mock.patch.multiple(dist, **changed):
                sharded()
            times = [f"{median_ms(call, repeats):.1f}" for call in (sharded, unsharded)]
            row = [rule, name, len(calls), f"{sum(calls) / rows:.0f}", whole, *times]
            if rank == 0 and (rule != "greedy" or name == "none"):
                print(f"| {' | '.join(map(str, row))} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    heads = (
        "rule", "filters", "exchanges", "bytes a row", "bytes a row of logits", "ms",
        "ms to gather and verify",
    )  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, options.vocab, f"{folder}/store", options.repeats)
        mp.spawn(measure, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
