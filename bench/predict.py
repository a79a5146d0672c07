"""Predicts the time of `verify_chain` on a GPU from counted instructions, bytes and round trips.

    python -m bench.predict [RESULTS.json | cuda-goals.jsonl]

A prediction is no measurement. It is printed beside measured times once there are any, to tell
which of its assumptions is wrong. The assumptions:

- Instructions of the loops are those that `bench.sass` counts; all others cost nothing. Of the
  issue slots, one a clock for each of four schedulers, a share `issued` is used.
- Memory gives `bandwidth` whatever is read; what is read twice comes from memory twice.
- A load, barrier or atomic that the next step depends on takes `trip` seconds. How many there are
  is counted in docs/design/cuda.md; nothing else is done in the meantime.
- Each draft is accepted with the probability that the config states, independently.
- The slowest sequence of the row-lazy schedule tests as many drafts as the mean maximum over the
  batch. Its group has the issue slots of its own blocks alone.
- A filter reads a target row FILTER_PASSES times more, at the instructions of a fill.
- A launch takes `launch` seconds from its start to its first and from its last instruction.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.configs import FILTERS, HEADLINE, Config
from bench.sass import budgets

FILTER_PASSES = 3
GROUP = 8  # the most blocks of a group
BLOCKS = 2  # of a multiprocessor
COUNTED = {(b.kernel, b.work.name): b.ceiling for b in budgets.LOOPS}


@dataclass(frozen=True)
class Gpu:
    """What is assumed of a device: counts, hertz, bytes a second, seconds, and a share."""

    processors: int = 132
    clock: float = 1.755e9
    issued: float = 0.7
    bandwidth: float = 4.3e12
    trip: float = 0.5e-6
    launch: float = 2e-6

    def issue(self, instructions: float, processors: float) -> float:
        """Seconds in which so many multiprocessors issue the instructions of all their warps."""
        return instructions / (processors * 4 * self.clock * self.issued)


@dataclass(frozen=True)
class Trips:
    """Round trips that wait for each other: to begin, for each tested draft, and to end."""

    begin: int
    row: int
    end: int


# docs/design/cuda.md counts those of the row-parallel schedule; the others follow the same steps.
LAZY = Trips(begin=2, row=9, end=9)
PARALLEL = Trips(begin=17, row=0, end=9)
PROBS = Trips(begin=4, row=0, end=13)


@dataclass(frozen=True)
class Prediction:
    """Microseconds, and what they are made of: the largest of the first three, and all trips."""

    schedule: str
    bytes_us: float
    issue_us: float
    slowest_us: float
    trips: float
    trips_us: float
    launch_us: float

    @property
    def us(self) -> float:
        return max(self.bytes_us, self.issue_us, self.slowest_us) + self.trips_us + self.launch_us


def mean_accepted(acceptance: float, gamma: int, batch: int = 1) -> float:
    """The mean of the largest number of accepted drafts in a batch of independent sequences."""
    return sum(1 - (1 - acceptance**i) ** batch for i in range(1, gamma + 1))


@dataclass(frozen=True)
class Demand:
    """What a sequence asks for, in the mean, and what the slowest one does.

    rows: rows that are read to be measured; `slowest_rows`, one after the other in one sequence.
    residuals: passes over a target and a draft row at once; `slowest_residuals` likewise.
    trips: round trips of the slowest sequence that wait for each other.
    """

    schedule: str
    rows: float
    residuals: float
    slowest_rows: float
    slowest_residuals: float
    trips: float


def demand(config: Config, gpu: Gpu) -> Demand:
    rejected = 1 - config.acceptance**config.gamma
    tested = mean_accepted(config.acceptance, config.gamma) + rejected
    if config.start == "probs":
        # Drafts are tested by single entries; then the residual or the bonus token's row is read.
        trips = PROBS.begin + PROBS.end
        return Demand("row-lazy", 1 - rejected, rejected, 0, 1, trips)
    filtered = FILTERS[config.filters][1:] != (0, 1.0)
    passes = FILTER_PASSES if filtered else 0
    if 2 * config.batch * GROUP <= gpu.processors:
        rows = 2 * config.gamma + 1 + passes * tested
        trips = PARALLEL.begin + PARALLEL.row * tested + PARALLEL.end + passes * tested
        return Demand("row-parallel", rows, rejected, passes * tested, 1, trips)
    longest = mean_accepted(config.acceptance, config.gamma, config.batch)
    trips = LAZY.begin + (LAZY.row + passes) * (longest + 1) + LAZY.end
    accepted = mean_accepted(config.acceptance, config.gamma)
    rows = accepted + 1 + tested + passes * (accepted + 1)
    # The bonus token of a sequence that accepts everything has a target row alone.
    slowest = 2 * longest + 1 + passes * (longest + 1)
    return Demand("row-lazy", rows, rejected, slowest, 0, trips)


def predict(config: Config, gpu: Gpu | None = None) -> Prediction:
    """The predicted time of one call of this project's CUDA kernel."""
    gpu = gpu or Gpu()
    wanted = demand(config, gpu)
    if config.element == 4:
        works = budgets.FILL_F32, budgets.RESIDUAL_PROBS
    else:
        works = budgets.FILL_BF16, budgets.RESIDUAL_BF16
    fill, residual = (COUNTED[budgets.CHAIN, work.name] for work in works)
    tiles = -(-config.vocabulary // 512)
    each = tiles * (wanted.rows * fill + wanted.residuals * residual)
    own = tiles * (wanted.slowest_rows * fill + wanted.slowest_residuals * residual)
    group = group_size(config, gpu, wanted.schedule == "row-parallel")
    busy = min(gpu.processors, config.batch * group)
    # Blocks of a group share multiprocessors only where there are more blocks than these.
    processors_of_group = min(group, gpu.processors / config.batch)
    everywhere = gpu.processors if wanted.schedule == "row-parallel" else busy
    row = config.vocabulary * config.element
    read = config.batch * row * (wanted.rows + 2 * wanted.residuals)
    return Prediction(
        wanted.schedule,
        bytes_us=read / gpu.bandwidth * 1e6,
        issue_us=gpu.issue(config.batch * each, everywhere) * 1e6,
        slowest_us=gpu.issue(own, processors_of_group) * 1e6,
        trips=wanted.trips,
        trips_us=wanted.trips * gpu.trip * 1e6,
        launch_us=gpu.launch * 1e6,
    )


def group_size(config: Config, gpu: Gpu, parallel: bool) -> int:
    """The blocks of a group: as many as let all of them run at once, as csrc/cuda/launch.cuh plans.

    In the row-parallel schedule there is a group for each row at least; less than half of the
    largest group is too small there for what the last one reads again.
    """
    rows = config.batch * (config.gamma + 1 if parallel else 1)
    size = max(1, min(GROUP, BLOCKS * gpu.processors // rows))
    return GROUP if parallel and 2 * size < GROUP else size


def measured(path: Path) -> dict[str, dict[str, Any]]:
    """Config id -> the row of the CUDA kernel, from a sweep's file or from the lines of `goals`."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        rows = [line["row"] for line in map(json.loads, text.splitlines()) if "row" in line]
    else:
        rows = json.loads(text)["rows"]
    return {row["config"]["id"]: row for row in rows if row["provider"] == "cuda"}


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """Predicted times of the goal configs; measured ones beside them, "-" where there are none."""
    out = Table(title="verify_chain on an H200: predicted, not measured, unless a heading says so")
    for heading in ("config", "schedule"):
        out.add_column(heading)
    for heading in ("bytes", "issue", "slowest", "trips", "predicted us", "measured us"):
        out.add_column(heading, justify="right")
    for config in HEADLINE["cuda"]:
        p, row = predict(config), rows.get(config.id, {})
        times = [row[k] for k in ("kernel_us", "graph_us", "us") if row.get(k) is not None]
        parts = [f"{us:.1f}" for us in (p.bytes_us, p.issue_us, p.slowest_us)]
        trips = f"{p.trips_us:.1f} ({p.trips:.0f})"
        seen = f"{times[0]:.1f}" if times else "-"
        out.add_row(config.id, p.schedule, *parts, trips, f"{p.us:.1f}", seen)
    return out


def main(
    results: Annotated[Path | None, typer.Argument(help="A results file of a GPU.")] = None,
) -> None:
    """Print predicted times, and measured ones beside them."""
    Console(width=150).print(table(measured(results) if results else {}))


if __name__ == "__main__":
    typer.run(main)
