"""Every benchmark runs its peer before each of its own rounds, so that a ratio compares neighbours
in time, and prints one table at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table


def seconds(f: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    f()
    return time.perf_counter() - begin


@pytest.fixture
def compare(benchmark):
    """compare(ours, eager, touched=bytes): times `ours`, the ratio goes to extra_info."""

    def run(
        ours: Callable[[], Any], eager: Callable[[], Any], *, touched: int, rounds: int = 30
    ) -> float:
        for _ in range(3):
            eager()
            ours()
        peers: list[float] = []
        own: list[float] = []
        benchmark.pedantic(
            lambda: own.append(seconds(ours)),
            setup=lambda: peers.append(seconds(eager)),
            rounds=rounds,
        )
        ratio = statistics.median(p / o for p, o in zip(peers, own, strict=True))
        median = statistics.median(own)
        benchmark.extra_info.update(
            bytes_touched=touched,
            gigabytes_per_second=touched / median / 1e9,
            eager_us=statistics.median(peers) * 1e6,
            ratio_to_eager=ratio,
        )
        return ratio

    return run


def pytest_terminal_summary(config):
    session = getattr(config, "_benchmarksession", None)
    rows = [b for b in getattr(session, "benchmarks", []) if "ratio_to_eager" in b.extra_info]
    if not rows:
        return
    table = Table("case", "us", "IQR", "MB touched", "GB/s", "eager us", "times faster")
    for b in sorted(rows, key=lambda b: b.name):
        info = b.extra_info
        table.add_row(
            b.name.removeprefix("test_"),
            f"{b.stats.median * 1e6:.0f}",
            f"{b.stats.iqr * 1e6:.0f}",
            f"{info['bytes_touched'] / 1e6:.2f}",
            f"{info['gigabytes_per_second']:.1f}",
            f"{info['eager_us']:.0f}",
            f"{info['ratio_to_eager']:.1f}",
        )
    Console(width=150).print(table)
