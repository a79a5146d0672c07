"""The tables of the command ``bench``, on the terminal and in Markdown; see docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.columns import Columns

from specdec_hf.cli.advice import in_options
from specdec_hf.cli.terminal import console, visible

if TYPE_CHECKING:
    from specdec_hf.lab.bench.summary import Row

WIDTH, GAP = 80, "  "
COLUMNS = (
    "config", "tokens/s", "ratio", "90 %", "median", "tau", "alpha", "bound", "eff.", "loop", "same"
)  # fmt: skip


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


Lines = list[tuple[str, ...]]


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
