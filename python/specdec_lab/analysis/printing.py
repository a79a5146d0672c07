"""What the command ``analyze`` prints: the rounds of Figure 1, and the tables."""

# ruff: noqa: PLC0415  # torch loads at first use; see cli/app.py
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text
from specdec_hf.cli.terminal import console, visible

from specdec_lab.analysis.tables import Found, ShownTable

if TYPE_CHECKING:
    from specdec_hf.cli.load import Loaded

    from specdec_lab.analysis.measure import DrafterAnalysis

SHOWN_ROUNDS = 12  # of the first answer of each drafter
NARROW = 5  # a table of more columns has less space between them


def print_report(loaded: Loaded, found: Found, tables: Sequence[ShownTable]) -> None:
    """Print the rounds of the first answer of each drafter, and every table."""
    console.print(visible(f"{loaded.title}, {loaded.dtype}, {loaded.model.device}"), style="bold")
    sampled = max(found)
    for one in found[sampled]:
        _print_rounds(one, sampled)
    for table in tables:
        _print_table(table)


def _print_rounds(one: DrafterAnalysis, temperature: float) -> None:
    from specdec_hf.cli.trace import legend, marks_of, styled

    marks, rounds = marks_of(console), one.answers[0]
    _head(f"Figure 1: rounds of the first answer, {one.name}, temperature {temperature:g}")
    for number, said in enumerate(rounds[:SHOWN_ROUNDS], start=1):
        pieces = (styled(token.text.replace("\n", "↵"), token.kind, marks) for token in said)
        line = Text().join(pieces)
        console.print(f"{number:3} ", line, sep="", style="" if marks else None)
    if len(rounds) > SHOWN_ROUNDS:
        more = len(rounds) - SHOWN_ROUNDS
        console.print(f"... {more} more rounds; --output writes all of them", style="dim")
    console.print(legend(marks))


def _print_table(shown: ShownTable) -> None:
    _head(shown.title)
    if shown.rows:
        table = Table(box=None, padding=(0, 1 if len(shown.names) > NARROW else 2, 0, 0))
        for i, name in enumerate(shown.names):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in shown.rows:
            table.add_row(*map(visible, row))
        console.print(table)
    if shown.note:
        console.print(visible(shown.note), style="dim")


def _head(title: str) -> None:
    console.rule(visible(title), align="left", style="dim")
