"""The measurement of one dtype, batch size and temperature, printed, and all of them written.

It is shared by the commands ``bench`` and ``bench-synthetic``.
"""

# ruff: noqa: PLC0415  # torch loads at first use; see cli/app.py
from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.columns import Columns

from specdec_hf.cli.checks import Settings
from specdec_hf.cli.report import collect_info, in_options, write_json
from specdec_hf.cli.run import progress
from specdec_hf.cli.terminal import console, visible

if TYPE_CHECKING:
    from specdec_hf.cli.load import Loaded
    from specdec_hf.lab.bench.runs import Batch, Config
    from specdec_hf.lab.bench.summary import Row
    from specdec_hf.loop.statistics import SpecStats
    from specdec_hf.schedules.costs import MonotoneCost

MOST_WIDTHS = 8  # of the cost curve
WIDTH, GAP = 80, "  "
COLUMNS = (
    "config", "tokens/s", "ratio", "90 %", "median", "tau", "alpha", "bound", "eff.", "loop", "same"
)  # fmt: skip
Lines = list[tuple[str, ...]]


class Results:
    """The tables of a command.

    Args:
        more: what else the report of each table says.
    """

    def __init__(self, **more: Any) -> None:
        self._more = more
        self._reports: list[dict[str, Any]] = []
        self._texts: list[str] = []

    def measure(
        self,
        loaded: Loaded,
        configs: list[Config],
        batches: list[Batch],
        settings: Settings,
        runs: int,
        left_out: dict[str, str],
    ) -> None:
        """Answer all batches with all configs, and print the table.

        Args:
            left_out: peers that cannot take part, and why.
        """
        title, report, rows = _measure(loaded, configs, batches, settings, runs)
        report |= {**self._more, "left_out": left_out | report["left_out"]}
        remarks = [f"left out, {name}: {why}" for name, why in report["left_out"].items()]
        remarks += _curve(report)
        print_report(title, rows, remarks)
        self._reports.append(report)
        self._texts.append(markdown_text(title, rows, remarks))

    def write(self, json_file: Path | None, markdown: Path | None) -> None:
        """Write the files that were asked for."""
        write_json(json_file, {"info": collect_info(), "results": self._reports})
        if markdown is not None:
            markdown.write_text("\n".join(self._texts), encoding="utf-8")
            console.print(visible(f"wrote {markdown}"), style="dim")


def _curve(report: dict[str, Any]) -> list[str]:
    """The cost curve in a line; several tokens in units of one."""
    curve = dict(report["forward_seconds"])
    one = curve.pop(1, None)
    if one is None:
        return []
    others = ", ".join(f"{n} tokens {seconds / one:.2f}" for n, seconds in curve.items())
    units = f"; in units of it {others}" if others else ""
    return [f"forward of the target: 1 token {1000 * one:.1f} ms{units}"]


def _measure(
    loaded: Loaded, configs: list[Config], batches: list[Batch], settings: Settings, runs: int
) -> tuple[str, dict[str, Any], list[Row]]:
    """Title, report for JSON, and rows of one dtype, batch size and temperature."""
    from specdec_hf.lab.bench.runs import run_pairs, warm_up
    from specdec_hf.lab.bench.summary import rows_of

    sampling = {name: settings.sampling[name] for name in ("temperature", "top_p", "top_k")}
    size = len(batches[0].prompts)
    how = "temperature {temperature:g}, top-p {top_p:g}" if settings.do_sample else "greedy"
    what = f"{len(batches)} prompts" if size == 1 else f"{len(batches)} batches of {size}"
    info = collect_info()
    title = (
        f"{loaded.title}, {loaded.dtype}, {loaded.model.device}, {info['threads']} threads "
        f"({platform.machine()}, {info['cpu_capability']}), {what}, "
        f"{how.format(**sampling)}, {settings.max_new_tokens} new tokens, median of {runs}"
    )
    arguments = {"max_new_tokens": settings.max_new_tokens, "do_sample": settings.do_sample}
    if settings.do_sample:
        arguments |= sampling
    with progress() as bar:
        steps = len(configs) + (len(configs) - 1) * len(batches) * runs
        task = bar.add_task("", total=steps)

        def advance(text: str) -> None:
            bar.update(task, advance=1, description=f"{loaded.dtype} {text}")

        taken, left_out = warm_up(loaded, configs, batches, arguments, advance)
        pairs = run_pairs(loaded, taken, batches, arguments, runs, advance)
    calls = [pair.mine.stats for each in pairs.values() for pair in each if pair.mine.stats]
    in_rounds = any(stats.forwards != "own" for stats in calls)
    forward = _forward_costs(loaded, batches, calls, left_out, in_rounds=in_rounds)
    rows = rows_of(configs, pairs, forward, sampled=settings.do_sample)
    if loaded.model.device.type != "cpu":  # the host only queues forwards
        rows = [replace(row, loop_share=None) for row in rows]
    report = {
        "title": title,
        "dtype": loaded.dtype,
        "batch_size": size,
        **sampling,
        "runs": runs,
        "left_out": left_out,
        "forward_seconds": {} if forward is None else forward.medians(),
        "rows": [row.to_dict() for row in rows],
    }
    return title, report, rows


def _forward_costs(
    loaded: Loaded,
    batches: list[Batch],
    calls: list[SpecStats],
    left_out: dict[str, str],
    *,
    in_rounds: bool,
) -> MonotoneCost | None:
    """Costs of forwards as wide as the rounds were, or in ``left_out`` why they are not known.

    They are those of the rounds where these run packed or compiled, which the bare model does not.
    The curve of the bare model is in units of its forward of one token. What that takes is known
    from the rounds of plain decoding, which met the noise that the others met.
    """
    from specdec_hf.lab.bench.efficiency import forward_costs, round_costs

    waits = loaded.model.device.type == "cpu"
    if in_rounds:
        if waits:
            return round_costs(calls)
        left_out["efficiency"] = "forwards of these rounds are not timed on a device"
        return None
    widths = sorted({1 + width for stats in calls for width in stats.gammas})
    few = [*widths[:: 1 + len(widths) // MOST_WIDTHS], *widths[-1:]]
    by_width = sorted(batches, key=lambda batch: batch.inputs["input_ids"].shape[1])
    try:
        curve = forward_costs(loaded.model, by_width[len(by_width) // 2].inputs, few)
    except (NotImplementedError, RuntimeError, ValueError) as error:  # the cache cannot be cropped
        left_out["efficiency"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return None
    step = round_costs([stats for stats in calls if stats.drafter == "none"]).median(1)
    return curve if step is None or not waits else curve.scaled(step / curve.at(1))


def print_report(title: str, rows: list[Row], remarks: list[str]) -> None:
    """Print the figures of all configs, the ratios by category, and the remarks.

    A config has a line of its own and its figures are below it, so that names and numbers are whole
    where the output is `WIDTH` columns wide.
    """
    (heading, header, configs), *by_category = _tables(title, rows)
    console.print(visible(heading), style="italic")
    figures = [[cell.replace(" of ", "/") for cell in cells] for _, *cells in configs]
    widths = [max(map(len, column)) for column in zip(header[1:], *figures, strict=True)]
    _print_cells(header[1:], widths)
    for row, numbers in zip(rows, figures, strict=True):
        console.print(visible(row.name), style="bold", soft_wrap=True)
        _print_cells(numbers, widths)
    for heading, (_, *names), lines in by_category:
        console.print(visible(heading), style="italic")
        longest = max(len(category) for category, *_ in lines)
        for number, name in enumerate(names, start=1):
            console.print(visible(name), style="bold", soft_wrap=True)
            ratios = [f"{cells[0]:<{longest}}  {cells[number]:<6}" for cells in lines]
            console.print(Columns(map(visible, ratios), padding=(0, 2)), width=WIDTH)
    for remark in _remarks(rows, remarks):
        console.print(visible(remark), style="dim")


def _print_cells(cells: Sequence[str], widths: Sequence[int]) -> None:
    line = GAP.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    console.print(line.rstrip(), soft_wrap=True)


def markdown_text(title: str, rows: list[Row], remarks: list[str]) -> str:
    """The same as Markdown."""
    text = []
    for heading, header, lines in _tables(title, rows):
        text += [f"{heading}:", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        text += ["| " + " | ".join(cells) + " |" for cells in lines]
        text.append("")
    return "\n".join([*text, *(f"- {one}" for one in _remarks(rows, remarks)), ""])


def _tables(title: str, rows: list[Row]) -> list[tuple[str, tuple[str, ...], Lines]]:
    """Heading, header and lines of each table."""
    tables: list[tuple[str, tuple[str, ...], Lines]] = [(title, COLUMNS, list(map(_cells, rows)))]
    several = [row for row in rows if len(row.categories) > 1]
    if several:
        header = ("category", *(row.name for row in several))
        names = several[0].categories
        lines = [(name, *(_flagged(row, name) for row in several)) for name in names]
        tables.append(("Ratio by category, ! below 0.97", header, lines))
    return tables


def _cells(row: Row) -> tuple[str, ...]:
    low_high = "" if row.interval is None else "{:.2f}-{:.2f}".format(*row.interval)
    return (
        row.name,
        f"{row.tokens_per_second:.1f}",
        f"{row.ratio:.2f}",
        low_high,
        f"{row.median_ratio:.2f}",
        _number(row.tokens_per_round),
        _number(row.alpha),
        _number(row.theorem),
        _number(row.efficiency),
        "" if row.loop_share is None else f"{row.loop_share:.1%}",
        "" if row.identical is None else f"{row.identical} of {row.texts}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _flagged(row: Row, category: str) -> str:
    return f"{row.categories[category]:.2f}{' !' if category in row.slow_categories else ''}"


def _remarks(rows: list[Row], remarks: list[str]) -> list[str]:
    return [*remarks, *(f"{row.name}: {in_options(note)}" for row in rows for note in row.notes)]
