"""Times calls that differ in one thing each, which tells what makes a call slow.

    python -m bench.stages [--device cuda] [--out FOLDER] [--budget 40]

`verify_chain` on 32 sequences of logits with each filter, and with a draft whose log-sum-exp is
known; more sequences; `sample`, beside FlashInfer's samplers where they are at hand. On a GPU calls
are replayed as CUDA graphs. Each point adds a line {"stage": ...} to DEVICE-goals.jsonl at once.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from proofs import zipf_logits

import specdec_kernels as sk
from bench import measure
from bench.configs import BASE, Config, Inputs, build, floor_bytes
from bench.goals import SMALL, Line, keep
from bench.peers import flashinfer

FILTERS: dict[str, dict[str, float]] = {
    "none": {}, "min_p": {"min_p": 0.1}, "k1": {"top_k": 1}, "k50": {"top_k": 50},
    "p.9": {"top_p": 0.9}, "k50-p.9": {"top_k": 50, "top_p": 0.9},
}  # fmt: skip
BATCHES = (64, 128, 256, 512)
ROWS = (1, 32, 512)
GRAPHS = 8  # captured calls, each with its own drafts and seeds


class Stage(NamedTuple):
    """A call, its name, and the bytes that it has to read."""

    name: dict[str, Any]
    call: Callable[[], Any]
    floor: float


def tensors(filters: dict[str, float], rows: int, device: str) -> dict[str, torch.Tensor]:
    """The filters for each row, as an engine has them."""
    kind = {"top_k": torch.int32}
    return {
        name: torch.full((rows,), value, dtype=kind.get(name, torch.float32), device=device)
        for name, value in filters.items()
    }


def verification(inputs: Inputs, filters: str) -> Stage:
    """`verify_chain` on the inputs of a config, with other filters than the config's."""
    config, draft, device = inputs.config, inputs.draft, str(inputs.target.device)
    if inputs.logsumexp is not None:
        kept = torch.full_like(inputs.logsumexp, -torch.inf, dtype=torch.float32)
        draft = sk.SampledDraft(draft, inputs.logsumexp, kept, inputs.temperature)
    more = tensors(FILTERS[filters], config.batch, device)
    turns = itertools.cycle(inputs.turns)

    def call() -> sk.Verdict:
        turn = next(turns)
        return sk.verify_chain(
            inputs.target, turn.tokens, draft, temperature=inputs.temperature, **more,
            seeds=turn.seeds, positions=inputs.positions,
        )  # fmt: skip

    accepted = torch.stack([call().num_accepted for _ in range(GRAPHS)]).cpu()
    name = {"op": "verify_chain", "config": config.id, "filter": filters}
    return Stage(name, call, floor_bytes(config, accepted))


def sampling(rows: int, vocabulary: int, filters: str, device: str) -> Iterator[Stage]:
    """`sample` on some rows, then other samplers on the same rows."""
    logits = zipf_logits(min(rows, 8), vocabulary, torch.Generator().manual_seed(0))
    logits = logits.bfloat16().to(device).repeat(-(-rows // 8), 1)[:rows].contiguous()
    seeds = torch.arange(rows, device=device)
    heat, filtered = torch.full((rows,), 0.8, device=device), FILTERS[filters]
    more = tensors(filtered, rows, device)
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: sk.sample(logits, temperature=heat, **more, seeds=seeds, positions=seeds)
    }
    if not flashinfer.available(device):
        k, p = int(filtered.get("top_k", 0)), filtered.get("top_p", 1.0)
        calls |= flashinfer.samplers(logits, 0.8, k, p)
    for sampler, call in calls.items():
        name = {"op": "sample", "rows": rows, "vocabulary": vocabulary, "filter": filters}
        yield Stage(name | {"sampler": sampler}, call, logits.numel() * 2)


def stages(device: str, base: Config, batches: tuple[int, ...]) -> Iterator[Stage]:
    """All stages; those at the base come first."""
    for start in ("logits", "sampled"):
        inputs = build(replace(base, start=start), device)
        for filters in FILTERS:
            yield verification(inputs, filters)
    for rows, filters in itertools.product(ROWS, ("none", "k50-p.9")):
        yield from sampling(rows, base.vocabulary, filters, device)
    for batch in batches:
        yield verification(build(replace(base, batch=batch), device), "none")


def timed(call: Callable[[], Any], device: str, seconds: float) -> float:
    """Microseconds of a call, the median."""
    replay = measure.capture(call, GRAPHS) if device == "cuda" else call
    measure.sync(device)
    return statistics.median(measure.rounds({"": replay}, device, budget=seconds)[""])


def lines(found: Iterator[Stage], device: str, *, seconds: float, budget: float) -> Iterator[Line]:
    """What is known after each stage."""
    begin = time.monotonic()
    for stage in found:
        try:
            us = timed(stage.call, device, seconds)
        except Exception as error:
            yield {"failed": {**stage.name, "reason": f"{type(error).__name__}: {error}"}}
            continue
        speed = stage.floor / us / 1e3
        yield {"stage": {**stage.name, "us": us, "floor_bytes": stage.floor, "gb_per_s": speed}}
        if time.monotonic() - begin > budget:
            yield {"left_out": {"reason": f"{budget:g} s were spent"}}
            return


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder of the file.")] = Path("bench/results"),
    seconds: Annotated[float, typer.Option(help="For each stage.")] = 0.5,
    budget: Annotated[float, typer.Option(help="Seconds after which no stage begins.")] = 40.0,
    small: Annotated[bool, typer.Option(help="Sizes of a rehearsal.")] = False,
) -> None:
    """Time the stages one after the other."""
    out.mkdir(parents=True, exist_ok=True)
    base = replace(BASE["cuda"], **SMALL) if small else BASE["cuda"]
    failed = 0
    found = stages(device, base, BATCHES[:1] if small else BATCHES)
    for line in lines(found, device, seconds=seconds, budget=budget):
        keep(out / f"{device}-goals.jsonl", line)
        failed += "failed" in line
    raise typer.Exit(code=int(failed > 0))


if __name__ == "__main__":
    typer.run(main)
