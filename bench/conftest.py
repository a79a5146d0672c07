"""The `compare` fixture of the benchmarks, and the table that is printed at the end.

Every benchmark calls its peers before each of its own rounds, so that a ratio compares calls that
are neighbours in time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from rich.console import Console
from rich.table import Column, Table

from bench import measure


@pytest.fixture
def compare(benchmark):
    """compare(ours, {name: peer}, floor=bytes): times `ours`; all else goes to `extra_info`.

    floor: bytes that this algorithm has to read, and for a cache to write.
    bytes_read: bytes that `ours` reads, if that is more than the floor.
    exps: exponentials that this algorithm has to compute; 0 if they are not counted.
    """

    def run(
        ours: Callable[[], Any],
        peers: Mapping[str, Callable[[], Any]],
        *,
        floor: float,
        bytes_read: float | None = None,
        exps: float = 0,
        rounds: int = 20,
    ) -> None:
        for _ in range(2):
            for f in (*peers.values(), ours):
                f()
        own: list[float] = []
        others: dict[str, list[float]] = {name: [] for name in peers}

        def before() -> None:
            for name, f in peers.items():
                others[name].append(measure.seconds(f))

        benchmark.pedantic(lambda: own.append(measure.seconds(ours)), setup=before, rounds=rounds)
        median = statistics.median(own)
        read = floor / measure.read_bandwidth("cpu")
        both = read + exps * measure.seconds_per_exp() if exps else None
        benchmark.extra_info.update(
            launches=measure.dispatched(ours)[0],
            bytes_read=floor if bytes_read is None else bytes_read,
            bytes_floor=floor,
            ratio_to_floor=median / read,
            ratio_to_read_and_exp=both and median / both,
            peak_extra_bytes=measure.peak_extra(ours, "cpu"),
            peer_us={name: statistics.median(s) * 1e6 for name, s in others.items()},
            times_faster={
                name: statistics.median(p / o for p, o in zip(s, own, strict=True))
                for name, s in others.items()
            },
        )

    return run


@pytest.hookimpl(trylast=True)  # prints below the table of pytest-benchmark
def pytest_terminal_summary(config):
    session = getattr(config, "_benchmarksession", None)
    rows = [b for b in getattr(session, "benchmarks", []) if "bytes_floor" in b.extra_info]
    if not rows:
        return
    table = Table(
        Column("case", no_wrap=True),
        *("us", "IQR", "launches", "MB read", "MB floor", "x floor", "x (read + exp)"),
        "peak extra KB",
        *("times faster than (us)",),
        title=f"memory is read at {measure.read_bandwidth('cpu') / 1e9:.1f} GB/s, "
        f"exp takes {measure.seconds_per_exp() * 1e9:.2f} ns",
    )
    for b in sorted(rows, key=lambda b: b.name):
        info = b.extra_info
        extra = info["peak_extra_bytes"]
        both = info["ratio_to_read_and_exp"]
        table.add_row(
            b.name.removeprefix("test_"),
            f"{b.stats.median * 1e6:.0f}",
            f"{b.stats.iqr * 1e6:.0f}",
            str(info["launches"]),
            f"{info['bytes_read'] / 1e6:.2f}",
            f"{info['bytes_floor'] / 1e6:.2f}",
            f"{info['ratio_to_floor']:.1f}",
            "-" if both is None else f"{both:.2f}",
            "-" if extra is None else f"{extra / 1024:.0f}",
            ", ".join(
                f"{name} {ratio:.1f} ({info['peer_us'][name]:.0f})"
                for name, ratio in info["times_faster"].items()
            ),
        )
    Console(width=190).print(table)
