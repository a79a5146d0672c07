"""Times every peer at every config of a grid and writes one JSON file.

    python -m bench.sweep [--op verify_tree] [--device cuda] [--quick] [--out FOLDER] [--budget S]

The file also names the peers that are absent, the configs left out and the failed measurements.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench import measure
from bench.configs import TURNS
from bench.measure import Spread
from bench.peers import Peer, Unsupported
from bench.results import Row, Run, machine
from bench.workloads import WORKLOADS, Cost, Workload

WARM = 1.5  # seconds of calls before a peer is timed
GRAPHS = 16  # captured calls, each with its own turn
T = TypeVar("T")


@dataclass
class Candidate:
    """A peer at a config, and its measurements."""

    peer: Peer
    call: Callable[[], Any]
    us: list[float] = field(default_factory=list)
    graph_us: list[float] = field(default_factory=list)
    accepted: torch.Tensor | None = None
    notes: list[str] = field(default_factory=list)

    def attempt(self, what: str, f: Callable[[], T]) -> T | None:
        """f(), or None and a note of the error, so that one failure does not end a sweep."""
        try:
            return f()
        except Exception as error:
            self.notes.append(f"{what}: {_short(error)}")
            return None


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def free_bytes(device: str) -> int:
    if device == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _prepare(peer: Peer, inputs: Any, run: Run, device: str) -> Candidate | None:
    """Build a peer and call it to warm it up and to learn its acceptance.

    This project's providers make one call for every turn, other peers until WARM seconds are over.
    """
    try:
        call = peer.build(inputs)
        accepted = [peer.accepted(call())]
        measure.sync(device)
        begin = time.monotonic()
        while len(accepted) < TURNS and (peer.ours or time.monotonic() - begin < WARM):
            accepted.append(peer.accepted(call()))
            measure.sync(device)
    except Unsupported as reason:
        run.skip(inputs.config.id, peer.name, str(reason))
    except Exception as error:
        run.skip(inputs.config.id, peer.name, f"failed: {_short(error)}")
    else:
        return Candidate(peer, call, accepted=torch.stack(accepted).cpu())
    return None


def _time(candidates: list[Candidate], device: str, seconds: float) -> None:
    calls = {e.peer.name: e.call for e in candidates}
    for name, us in measure.rounds(calls, device, budget=seconds).items():
        next(e for e in candidates if e.peer.name == name).us = us
    if device != "cuda":
        return
    graphs = {}
    for e in candidates:
        if e.peer.reads:
            e.notes.append("graph: reads the device from the host")
            continue
        replay = e.attempt("graph", partial(measure.capture, e.call, GRAPHS))
        if replay is not None:
            graphs[e.peer.name] = replay
        torch.cuda.synchronize()
    for name, us in measure.rounds(graphs, device, budget=seconds).items():
        next(e for e in candidates if e.peer.name == name).graph_us = us


def _ratios(own: list[float], others: dict[str, list[float]]) -> dict[str, float]:
    return {
        name: statistics.median(o / u for o, u in zip(us, own, strict=True))
        for name, us in others.items()
        if own and us
    }


def _suspect(accepted: torch.Tensor, expected: torch.Tensor) -> str:
    """A note if a peer accepts more or fewer drafts than ours: its rule may be another one."""
    own, ours = accepted.double().flatten(), expected.double().flatten()
    error = float((own.var() / len(own) + ours.var() / len(ours)).nan_to_num().sqrt())
    if abs(float(own.mean() - ours.mean())) <= 5 * error + 0.05:
        return ""
    return f"suspect: accepts {own.mean():.2f} drafts where ours accepts {ours.mean():.2f}"


def _row(
    e: Candidate,
    candidates: list[Candidate],
    config: Any,
    expected: torch.Tensor,
    cost: Cost,
    device: str,
) -> Row:
    us = Spread.of(e.us)
    floor_us = cost.floor / measure.read_bandwidth(device) * 1e6
    graph = Spread.of(e.graph_us) if e.graph_us else None
    launches: float | None = None
    kernel_us: float | None = None
    bytes_read: float | None = None
    if device == "cuda":
        own = "specdec::cuda" if e.peer.name == "cuda" else ""
        activity = e.attempt("profiler", lambda: measure.device_activity(e.call, GRAPHS, own))
        launches, kernel_us = activity or (None, None)
    elif e.peer.compiles:
        e.notes.append("launches: compiled code dispatches no ops")
    elif counted := e.attempt("launches", lambda: measure.dispatched(e.call)):
        launches, bytes_read = counted
    if e.peer.ours:
        bytes_read = cost.read
    times = [t for t in (us.median, graph.median if graph else None, kernel_us) if t]
    peers = [other for other in candidates if other is not e]
    assert e.accepted is not None
    if suspicion := _suspect(e.accepted, expected):
        e.notes.append(suspicion)
    return Row(
        provider=e.peer.name,
        config=config.as_dict(),
        us=us.median,
        us_low=us.low,
        us_high=us.high,
        rounds=len(e.us),
        mean_accepted=float(e.accepted.double().mean()),
        floor_bytes=cost.floor,
        floor_us=floor_us,
        ratio_to_floor=min(times) / floor_us,
        bytes_read=bytes_read,
        launches=launches,
        graph_us=graph.median if graph else None,
        graph_us_low=graph.low if graph else None,
        graph_us_high=graph.high if graph else None,
        kernel_us=kernel_us,
        peak_extra_bytes=e.attempt("memory", lambda: measure.peak_extra(e.call, device)),
        times_faster=_ratios(e.us, {o.peer.name: o.us for o in peers}),
        times_faster_graph=_ratios(e.graph_us, {o.peer.name: o.graph_us for o in peers}),
        notes=e.notes,
    )


def measure_config(
    config: Any, work: Workload, run: Run, device: str, *, seconds: float, compiled: bool
) -> list[Row]:
    """One row for each peer that supports the config; `run.skipped` names the others."""
    inputs = work.build(config, device)
    candidates = []
    for peer in work.peers:
        if peer.compiles and not compiled:
            run.skip(config.id, peer.name, "compiled for few configs only")
        elif candidate := _prepare(peer, inputs, run, device):
            candidates.append(candidate)
    if not candidates:
        return []
    _time(candidates, device, seconds)
    # The floor depends on how many drafts are accepted; our first provider says how many.
    expected = next((e for e in candidates if e.peer.ours), candidates[0]).accepted
    assert expected is not None
    cost = work.cost(inputs, expected)
    return [_row(e, candidates, config, expected, cost, device) for e in candidates]


def sweep(
    configs: list[Any],
    device: str,
    op: str = "verify_chain",
    *,
    budget: float,
    only: list[str] | None = None,
    compiled: tuple[Any, ...] = (),
    progress: Callable[[Run, list[Row]], None] = lambda run, rows: None,
) -> Run:
    """Measure the configs in order until the budget of seconds is spent.

    compiled: the configs at which peers with a long compilation are timed.
    progress: called after each config with the run so far and the config's rows.
    """
    begin = time.monotonic()
    run = Run({**machine(device), "op": op})
    present = []
    for peer in WORKLOADS[op].peers:
        reason = "not asked for" if only and peer.name not in only else peer.available(device)
        if reason:
            run.absent[peer.name] = reason
        else:
            present.append(peer)
    work = dataclasses.replace(WORKLOADS[op], peers=tuple(present))
    run.machine["bandwidth"] = measure.read_bandwidth(device)
    for i, config in enumerate(configs):
        left = budget - (time.monotonic() - begin)
        if left <= 0:
            run.skip(config.id, "all", f"the budget of {budget:g} s was spent")
        elif (need := config.needed_bytes) > 0.9 * free_bytes(device):
            run.skip(config.id, "all", f"needs {need / 2**30:.1f} GiB")
        else:
            # Building inputs, warming up and counting take about as long as the timing itself.
            share = left / (len(configs) - i) / 4
            rows = measure_config(
                config, work, run, device, seconds=share, compiled=config in compiled
            )
            run.rows += rows
            run.machine["seconds"] = round(time.monotonic() - begin, 1)
            progress(run, rows)
    run.machine["seconds"] = round(time.monotonic() - begin, 1)
    return run


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def table(rows: list[Row]) -> Table:
    """A table of the rows of one config."""
    out = Table(
        *("provider", "us", "IQR", "graph us", "kernel us", "launches", "MB read", "MB floor"),
        *("x floor", "peak extra KB", "ours is faster"),
        title=f"{rows[0].config['id']}  floor {rows[0].floor_us:.1f} us",
    )
    ours = rows[0].times_faster
    for row in rows:
        megabytes = None if row.bytes_read is None else row.bytes_read / 1e6
        extra = None if row.peak_extra_bytes is None else row.peak_extra_bytes / 1024
        out.add_row(
            row.provider,
            _number(row.us),
            _number(row.us_high - row.us_low),
            _number(row.graph_us),
            _number(row.kernel_us),
            _number(row.launches, ".0f"),
            _number(megabytes, ".2f"),
            _number(row.floor_bytes / 1e6, ".2f"),
            _number(row.ratio_to_floor, ".2f"),
            _number(extra, ".0f"),
            _number(ours.get(row.provider), ".1f") if row is not rows[0] else "",
        )
    return out


def main(
    op: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "verify_chain",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    quick: Annotated[bool, typer.Option(help="A small grid.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the JSON file and plots.")] = Path(
        "bench/results"
    ),
    budget: Annotated[float, typer.Option(help="Seconds; configs left out are listed.")] = 0.0,
    only: Annotated[list[str] | None, typer.Option(help="Peers; all by default.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves PyTorch's.")] = 0,
) -> None:
    """Time an op and its peers over its grid."""
    console = Console(width=170)
    if op not in WORKLOADS:
        raise typer.BadParameter(f"op must be one of {', '.join(WORKLOADS)}, got {op}")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"device must be cpu or cuda, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device")
    work = WORKLOADS[op]
    unknown = set(only or ()) - {peer.name for peer in work.peers}
    if unknown:
        raise typer.BadParameter(f"unknown providers: {', '.join(sorted(unknown))}")
    if threads:
        torch.set_num_threads(threads)
    seconds = budget or (120.0 if quick else 1800.0)
    configs = work.grid(device, quick=quick)

    def keep(run: Run, rows: list[Row]) -> None:
        run.write(out)
        if rows:
            console.print(table(rows))

    run = sweep(
        configs,
        device,
        op,
        budget=seconds,
        only=only,
        compiled=work.compiled(device)[: 1 if quick else None],
        progress=keep,
    )
    path = run.write(out)
    console.print(f"{run.machine['device']}: {run.machine['bandwidth'] / 1e9:.1f} GB/s read")
    for name, reason in run.absent.items():
        console.print(f"absent: {name}: {reason}")
    for row in run.rows:
        for note in row.notes:
            console.print(f"note: {row.config['id']} {row.provider}: {note}")
    for left in run.skipped:
        console.print(f"left out: {left['config']} {left['provider']}: {left['reason']}")
    console.print(f"{len(run.rows)} rows in {path}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
