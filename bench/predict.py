"""Predicts the time of `verify_chain` on a GPU from counted instructions, bytes and round trips.

    python -m bench.predict [--gpu H200] [RESULTS.json | cuda-goals.jsonl]

A prediction is no measurement. It is printed beside measured times once there are any, to tell
which of its assumptions is wrong. The assumptions:

- Instructions of the loops are those that `bench.sass` counts. Of the issue slots, one a clock for
  each of four schedulers, a share `issued` is used.
- What one warp does outside of the loops, one thing after the other, takes the stall counts that
  `bench.sass` adds up along its path (`ROUTES`), and the waits for results of which it knows the
  latency. Waits for other warps, shuffles and conversions are left out, so that this part bounds
  the time from below. The general kernel is taken to do what the one for logits does.
- The code of that path comes from memory, once: benchmarks empty the L2 cache before each call, and
  between two calls of a model its weights pass through it. The caches of a multiprocessor are taken
  to keep nothing either. Groups of later waves find the code that earlier ones have fetched.
- Memory gives `bandwidth` whatever is read; what is read twice comes from memory twice.
- A load, barrier or atomic that the next step depends on takes `trip` seconds. How many there are
  is counted in docs/design/cuda.md; nothing else is done in the meantime.
- A warp waits one trip for each round of warp tiles. The first round is among the trips that are
  counted there; the others take as long as they do, or as their instructions if that is longer.
- Block groups of every size fit the device without a rest. The plan is that of
  csrc/cuda/plan.cuh and csrc/cuda/chain/verify_chain.cu.
- Each draft is accepted with the probability that the config states, independently.
- Row-lazy: the slowest sequence tests as many drafts as the mean maximum over the batch. Its group
  has the issue slots of its own blocks alone.
- Row-parallel reads all rows. With more groups than run at once the groups run in waves, and no
  group begins before the wave before it has ended. The decisions of the first sequences, which
  others read beside, are counted as if they came after all reading.
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
from bench.results import commit
from bench.sass import budgets

FILTER_PASSES = 3
GROUP = 8  # the most blocks of a group
WARPS = 8  # of a block
# Blocks that run at once on a multiprocessor.
BLOCKS = {b.kernel: b.least_blocks for b in budgets.KERNELS}
COUNTED = {(b.kernel, b.work.name): b.ceiling for b in budgets.LOOPS}
COSTS = {(b.kernel, b.route.name): b for b in budgets.ROUTES}


@dataclass(frozen=True)
class Gpu:
    """What is assumed of a device: counts, hertz, bytes a second, seconds, and a share."""

    processors: int = 132
    clock: float = 1.755e9
    issued: float = 0.7
    bandwidth: float = 4.3e12
    trip: float = 0.5e-6
    launch: float = 2e-6
    name: str = "H200"

    def issue(self, instructions: float, processors: float) -> float:
        """Seconds in which so many multiprocessors issue the instructions of all their warps."""
        return instructions / (processors * 4 * self.clock * self.issued)


# Assumed to differ in their memory alone: an H200 copied 4.3 TB/s, and 3.0 on an H100 is a guess.
GPUS = {gpu.name: gpu for gpu in (Gpu(), Gpu(name="H100", bandwidth=3.0e12))}


def gpu_called(name: str) -> Gpu | None:
    """The device that a driver calls so, such as NVIDIA H200; None if nothing is known of it."""
    return next((gpu for key, gpu in GPUS.items() if key in name.split()), None)


# Round trips that wait for each other, as docs/design/cuda.md counts them.
OPEN = 1  # the drafted tokens, seed, position and temperature, and the ticket
FILL = 1  # the first warp tiles of the target row and of the draft row
BARRIER = 1
ARRIVE = 4  # barrier; fence; ticket; answer
MEASURE = 1  # the statistics of two warp tiles a thread, with the entry of the drafted token
RESIDUAL = 3  # first warp tiles, barrier, sums
DRAW = 2  # the chosen warp tile of the target, then of the draft
ENTRIES = 1  # probabilities: Q and P of the drafted tokens
# The general kernel waits before it writes the sums of a residual, and loads the warp tiles that it
# draws from side by side.
GENERAL_END = BARRIER + RESIDUAL + 1


@dataclass(frozen=True)
class Prediction:
    """Microseconds, and what they are made of: the largest of the first three, and all others."""

    gpu: str
    schedule: str
    bytes_us: float
    issue_us: float
    slowest_us: float
    trips: float
    trips_us: float
    serial_us: float
    code_us: float
    launch_us: float

    @property
    def us(self) -> float:
        loops = max(self.bytes_us, self.issue_us, self.slowest_us)
        return loops + self.trips_us + self.serial_us + self.code_us + self.launch_us


def mean_accepted(acceptance: float, gamma: int, batch: int = 1) -> float:
    """The mean of the largest number of accepted drafts in a batch of independent sequences."""
    return sum(1 - (1 - acceptance**i) ** batch for i in range(1, gamma + 1))


@dataclass(frozen=True)
class Plan:
    """How a launch shares its work.

    rows: those of a sequence that groups share; 1 in the row-lazy schedule.
    splits: how many groups share a row.
    at_once: how many groups run at once.
    """

    kernel: str
    parallel: bool
    rows: int
    group: int
    splits: int
    at_once: int

    @property
    def schedule(self) -> str:
        return "row-parallel" if self.parallel else "row-lazy"

    def waves(self, batch: int) -> int:
        """How often groups run one after the other, where each has one row or a split of it."""
        return -(-batch * self.rows * self.splits // self.at_once)


def plan(config: Config, gpu: Gpu) -> Plan:
    """The plan of csrc/cuda/plan.cuh on a device that groups of every size fill."""
    filtered = filters(config)
    kernel = budgets.GENERAL if filtered else budgets.LOGITS
    if config.start == "probs":
        kernel = budgets.PROBS
    blocks = BLOCKS[kernel] * gpu.processors
    busy = config.batch * GROUP
    parallel = config.start != "probs" and 2 * busy <= (gpu.processors if filtered else blocks)
    rows = config.gamma + 1 if parallel else 1
    size = max(1, min(GROUP, blocks // (config.batch * rows)))
    # Too small for what the last group reads again.
    if parallel and 2 * size < GROUP:
        size = GROUP
    at_once = blocks // size
    useful = -(-tiles_of(config) * 2 // (WARPS * size))
    splits = max(1, min(at_once // (config.batch * rows), useful)) if parallel else 1
    return Plan(kernel, parallel, rows, size, splits, at_once)


def filters(config: Config) -> bool:
    return config.start != "probs" and FILTERS[config.filters][1:] != (0, 1.0)


def tiles_of(config: Config) -> int:
    return -(-config.vocabulary // 512)


@dataclass(frozen=True)
class Demand:
    """What a sequence asks for, in the mean, and what the slowest one does.

    rows: rows that are read to be measured.
    residuals: passes over a target and a draft row at once.
    slowest_rows, slowest_residuals: those that one group of the slowest sequence reads by itself,
        one after the other.
    rounds: of warp tiles after the first one of each row, one after the other.
    trips: round trips of the slowest sequence that wait for each other.
    """

    rows: float
    residuals: float
    slowest_rows: float
    slowest_residuals: float
    rounds: float
    trips: float


def demand(config: Config, planned: Plan) -> Demand:
    gamma, tiles = config.gamma, tiles_of(config)
    # One warp tile of both rows is on its way, or two of a row of 16-bit logits.
    warps, at_once = WARPS * planned.group, 1 if config.element == 4 else 2
    # Half of the warps read the target row, the others the draft row.
    fill_rounds = later_rounds(tiles, warps * planned.splits * at_once // 2)
    residual_rounds = later_rounds(tiles, warps)
    rejected = 1 - config.acceptance**gamma
    accepted = mean_accepted(config.acceptance, gamma)
    tested = accepted + rejected
    if config.start == "probs":
        # Drafts are tested by single entries; then the residual or the bonus token's row is read.
        # A group waits for the readers of the sums of the sequence before.
        trips: float = OPEN + ENTRIES + BARRIER + RESIDUAL + DRAW
        rounds: float = residual_rounds
        return Demand(1 - rejected, rejected, 0, 1, rounds, trips)
    passes = FILTER_PASSES if filters(config) else 0
    # After the filters the statistics of the target row are read again.
    of_row = 2 * MEASURE + (passes + MEASURE if passes else 0)
    if planned.parallel and passes:
        trips = OPEN + FILL + ARRIVE + of_row * (accepted + 1) + GENERAL_END
        rounds = fill_rounds + passes * tested * residual_rounds + residual_rounds
        rows = 2 * gamma + 1 + passes * tested
        return Demand(rows, rejected, passes * tested, 1, rounds, trips)
    if planned.parallel:
        waves = planned.waves(config.batch)
        # The blocks of the last group take turns, and then tell each other.
        turns = -(-(2 * gamma + 1) // planned.group)
        trips = waves * (OPEN + FILL + ARRIVE) + turns * MEASURE + BARRIER + RESIDUAL + DRAW
        rounds = waves * fill_rounds + residual_rounds
        return Demand(2 * gamma + 1, rejected, 0, 1, rounds, trips)
    longest = mean_accepted(config.acceptance, gamma, config.batch)
    each = FILL + BARRIER + of_row
    trips = OPEN + each * (longest + 1) + (GENERAL_END if passes else RESIDUAL + DRAW)
    rows = accepted + 1 + tested + passes * (accepted + 1)
    # The bonus token of a sequence that accepts everything has a target row alone.
    slowest = 2 * longest + 1 + passes * (longest + 1)
    rounds = (longest + 1) * fill_rounds + passes * (longest + 1) * residual_rounds
    return Demand(rows, rejected, slowest, 0, rounds, trips)


def serial_cycles(config: Config, planned: Plan) -> tuple[float, float]:
    """(cycles, those in which its code comes from memory) of the slowest sequence's warp outside of
    the loops."""
    if config.start == "probs":
        alone = COSTS[budgets.PROBS, budgets.PROBS_ROUTE.name]
        return alone.warm, alone.cold - alone.warm
    ticket, one_turn, two_turns, one_row, two_rows = (
        COSTS[budgets.LOGITS, route.name] for route in budgets.LOGITS_ROUTES
    )
    if planned.parallel:
        first, second = one_turn, two_turns
        again: float = -(-(2 * config.gamma + 1) // planned.group) - 1  # turns after the first one
        before = (planned.waves(config.batch) - 1) * ticket.warm
    else:
        first, second, before = one_row, two_rows, 0
        again = mean_accepted(config.acceptance, config.gamma, config.batch)
    warm = first.warm + again * (second.warm - first.warm)
    cold = first.cold + again * (second.cold - first.cold)
    return before + warm, cold - warm


def predict(config: Config, gpu: Gpu | None = None) -> Prediction:
    """The predicted time of one call of this project's CUDA kernel."""
    gpu = gpu or Gpu()
    planned = plan(config, gpu)
    wanted = demand(config, planned)
    fill, residual = instructions(config, planned.kernel)
    tiles = tiles_of(config)
    each = tiles * (wanted.rows * fill + wanted.residuals * residual)
    own = tiles * (wanted.slowest_rows * fill + wanted.slowest_residuals * residual)
    groups = min(planned.at_once, config.batch * planned.rows * planned.splits)
    busy = min(gpu.processors, groups * planned.group)
    # Blocks of a group share multiprocessors only where there are more blocks than these. Rows
    # that one group reads by itself are read when one group of each sequence is left.
    processors_of_group = min(planned.group, gpu.processors / min(groups, config.batch))
    serial, code = serial_cycles(config, planned)
    row = config.vocabulary * config.element
    read = config.batch * row * (wanted.rows + 2 * wanted.residuals)
    return Prediction(
        gpu.name,
        planned.schedule,
        bytes_us=read / gpu.bandwidth * 1e6,
        issue_us=gpu.issue(config.batch * each, busy) * 1e6,
        slowest_us=max(gpu.issue(own, processors_of_group), wanted.rounds * gpu.trip) * 1e6,
        trips=wanted.trips,
        trips_us=wanted.trips * gpu.trip * 1e6,
        serial_us=serial / gpu.clock * 1e6,
        code_us=code / gpu.clock * 1e6,
        launch_us=gpu.launch * 1e6,
    )


def instructions(config: Config, kernel: str) -> tuple[float, float]:
    """A warp's for a warp tile: to measure it, and for a residual."""
    if config.start == "probs":
        # The row of a bonus token is read as the target's row of a residual is, at most.
        both = COUNTED[kernel, budgets.RESIDUAL_PROBS.name]
        return both, both
    fill = budgets.FILL_F32 if config.element == 4 else budgets.FILL_BF16
    # Nobody counts the residual from float32 logits: it computes what that from bfloat16 does.
    return COUNTED[kernel, fill.name], COUNTED[kernel, budgets.RESIDUAL_BF16.name]


def later_rounds(tiles: int, at_once: int) -> int:
    """The rounds after the first one in which so many warp tiles are read at once."""
    return -(-tiles // at_once) - 1


def measured(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """(device and commit, config id -> row of the CUDA kernel) of a file of a sweep or of goals."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
        machines = [line["machine"] for line in lines if "machine" in line]
        rows = [line["row"] for line in lines if "row" in line]
    else:
        found = json.loads(text)
        machines, rows = [found["machine"]], found["rows"]
    where = f"{machines[0].get('device')} at commit {machines[0].get('commit')}" if machines else ""
    return where, {row["config"]["id"]: row for row in rows if row["provider"] == "cuda"}


def table(gpu: Gpu, rows: dict[str, dict[str, Any]], where: str = "") -> Table:
    """Predicted times of the goal configs; measured ones beside them, "-" where there are none."""
    beside = f"; measured on {where}" if rows else ""
    now = f"one {gpu.name} at commit {commit() or 'unknown'}"
    out = Table(title=f"verify_chain: predicted for {now}, not measured{beside}")
    for heading in ("config", "schedule"):
        out.add_column(heading)
    parts = "bytes", "issue", "slowest", "trips", "serial", "code"
    for heading in (*parts, "predicted us", "measured us", "ratio"):
        out.add_column(heading, justify="right")
    for config in HEADLINE["cuda"]:
        p, row = predict(config, gpu), rows.get(config.id, {})
        seen = [row[k] for k in ("kernel_us", "graph_us", "us") if row.get(k) is not None]
        shares = [f"{us:.1f}" for us in (p.bytes_us, p.issue_us, p.slowest_us)]
        trips = f"{p.trips_us:.1f} ({p.trips:.0f})"
        times = [f"{p.us:.1f}", *([f"{seen[0]:.1f}", f"{seen[0] / p.us:.1f}"] if seen else "--")]
        alone = f"{p.serial_us:.1f}", f"{p.code_us:.1f}"
        out.add_row(config.id, p.schedule, *shares, trips, *alone, *times)
    return out


def main(
    results: Annotated[
        Path | None, typer.Argument(help="A results file of a GPU.", exists=True, dir_okay=False)
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "H200",
) -> None:
    """Print predicted times, and measured ones beside them."""
    if gpu not in GPUS:
        raise typer.BadParameter(f"must be one of {', '.join(GPUS)}, got {gpu}", param_hint="gpu")
    where, rows = measured(results) if results else ("", {})
    Console(width=175).print(table(GPUS[gpu], rows, where))


if __name__ == "__main__":
    typer.run(main)
