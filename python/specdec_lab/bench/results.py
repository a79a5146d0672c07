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
    from specdec_hf.loop.statistics import SpecStats
    from specdec_hf.schedules.costs import MonotoneCost

    from specdec_lab.bench.runs import Config, PromptBatch
    from specdec_lab.bench.summary import Row

MOST_WIDTHS = 8  # of the cost curve
SLOWEST_CATEGORY = 0.97  # a ratio below it is flagged
WIDTH, GAP = 80, "  "
SPEEDS = ("config", "tokens/s", "ratio", "90 %", "library", "speculation", "90 %", "same")
ROUNDS = ("config", "decode", "GB/s", "median", "tau", "alpha", "bound", "eff.", "loop")
WORDS = (
    "ratio: over model.generate; library: without drafts over model.generate, in the same turns; "
    "speculation: with drafts over without"
)
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
        batches: list[PromptBatch],
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
    loaded: Loaded, configs: list[Config], batches: list[PromptBatch], settings: Settings, runs: int
) -> tuple[str, dict[str, Any], list[Row]]:
    """Title, report for JSON, and rows of one dtype, batch size and temperature."""
    from specdec_lab.bench.runs import run_turns, turns_of, warm_up
    from specdec_lab.bench.summary import rows_of

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
        steps = len(configs) + sum(map(len, turns_of(configs))) * len(batches) * runs
        task = bar.add_task("", total=steps)

        def advance(text: str) -> None:
            bar.update(task, advance=1, description=f"{loaded.dtype} {text}")

        taken, left_out = warm_up(loaded, configs, batches, arguments, advance)
        turns = run_turns(loaded, taken, batches, arguments, runs, advance)
    answers = [
        answer
        for each in turns.values()
        for one in each
        for answer in (one.mine, one.without_drafts)
    ]
    calls = [answer.stats for answer in answers if answer is not None and answer.stats]
    in_rounds = any(stats.forwards != "own" for stats in calls)
    forward = _forward_costs(loaded, batches, calls, left_out, in_rounds=in_rounds)
    rows = rows_of(configs, turns, forward, sampled=settings.do_sample)
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
    batches: list[PromptBatch],
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
    from specdec_lab.bench.efficiency import forward_costs, round_costs

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
    speeds, rounds, *by_category = _tables(title, rows)
    for table in (speeds, rounds):
        print_figures(*table)
    for heading, (_, *names), lines in by_category:
        console.print(visible(heading), style="italic")
        longest = max(len(category) for category, *_ in lines)
        for number, name in enumerate(names, start=1):
            console.print(visible(name), style="bold", soft_wrap=True)
            ratios = [f"{cells[0]:<{longest}}  {cells[number]:<11}" for cells in lines]
            console.print(Columns(map(visible, ratios), padding=(0, 2)), width=WIDTH)
    for remark in _remarks(rows, remarks):
        console.print(visible(remark), style="dim")


def print_figures(heading: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table, each of whose lines begins with a name, with the figures below the name."""
    console.print(visible(heading), style="italic")
    figures = [[cell.replace(" of ", "/") for cell in cells] for _, *cells in lines]
    widths = [max(map(len, column)) for column in zip(header[1:], *figures, strict=True)]
    _print_cells(header[1:], widths)
    for (name, *_), numbers in zip(lines, figures, strict=True):
        console.print(visible(name), style="bold", soft_wrap=True)
        _print_cells(numbers, widths)


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
    tables = [
        (title, SPEEDS, list(map(_cells_of_speeds, rows))),
        ("Rounds", ROUNDS, list(map(_cells_of_rounds, rows))),
    ]
    several = [row for row in rows if len(row.categories) > 1]
    if several:
        header = ("category", *(row.name for row in several))
        names = several[0].categories
        lines = [(name, *(_by_category(row, name) for row in several)) for name in names]
        tables.append(("Ratio by category, in brackets speculation; ! below 0.97", header, lines))
    return tables


def _cells_of_speeds(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.speeds.with_drafts:.1f}",
        f"{row.ratio:.2f}",
        _interval(row.interval),
        _number(row.speeds.library),
        _number(row.speeds.speculation),
        _interval(row.speculation_interval),
        "" if row.identical is None else f"{row.identical} of {row.texts}",
    )


def _cells_of_rounds(row: Row) -> tuple[str, ...]:
    speeds = ("" if x is None else f"{x:.1f}" for x in (row.decode, row.gigabytes))
    numbers = (row.median_ratio, row.tokens_per_round, row.alpha, row.theorem, row.efficiency)
    loop = "" if row.loop_share is None else f"{row.loop_share:.1%}"
    return (row.name, *speeds, *map(_number, numbers), loop)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else "{:.2f}-{:.2f}".format(*ends)


def _by_category(row: Row, category: str) -> str:
    speeds = row.categories[category]
    text = _flagged(speeds.together or 0.0)
    return text if speeds.speculation is None else f"{text} ({_flagged(speeds.speculation)})"


def _flagged(ratio: float) -> str:
    return f"{ratio:.2f}{' !' if ratio < SLOWEST_CATEGORY else ''}"


def _remarks(rows: list[Row], remarks: list[str]) -> list[str]:
    notes = [f"{row.name}: {in_options(note)}" for row in rows for note in row.notes]
    return [WORDS, *remarks, *notes]
