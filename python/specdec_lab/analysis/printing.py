"""What the command ``analyze`` prints, in the terminal and on its page: Figure 1 and the tables."""

# ruff: noqa: PLC0415  # torch loads at first use; see cli/app.py
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text
from specdec_hf.cli.prompts import Question
from specdec_hf.cli.terminal import Terminal, console, visible

from specdec_lab.analysis.tables import ByTemperature, ShownTable

if TYPE_CHECKING:
    from specdec_hf.cli.explain import Explained
    from specdec_hf.cli.load import Loaded

    from specdec_lab.analysis.measure import DrafterAnalysis

SHOWN_ROUNDS = 12  # of the first answer of each drafter
NARROW = 5  # a table of more columns has less space between them


def print_report(loaded: Loaded, found: ByTemperature, tables: Sequence[ShownTable]) -> None:
    """Print the rounds of the first answer of each drafter, and every table."""
    console.print(visible(f"{loaded.title}, {loaded.dtype}, {loaded.model.device}"), style="bold")
    sampled = max(found)
    for one in found[sampled]:
        _print_rounds(one, sampled)
    for table in tables:
        print_table(table)


def print_answer(
    drafter: str, prompt: Question, rounds: Sequence[Sequence[Explained]], terminal: Terminal
) -> None:
    """Print all rounds of an answer, each on a line, and what was decided in them."""
    from specdec_hf.cli.decisions import print_chains

    _head(f"{drafter}: {prompt}", terminal)
    terminal.print(visible(prompt.turns[0]), style="dim")
    _print_lines(rounds, terminal)
    print_chains([*enumerate(rounds, start=1)], terminal)


def _print_rounds(one: DrafterAnalysis, temperature: float) -> None:
    rounds = one.answers[0]
    _head(f"Figure 1: rounds of the first answer, {one.name}, temperature {temperature:g}")
    _print_lines(rounds[:SHOWN_ROUNDS])
    if len(rounds) > SHOWN_ROUNDS:
        more = len(rounds) - SHOWN_ROUNDS
        console.print(f"... {more} more rounds; --output writes all of them", style="dim")


def _print_lines(rounds: Sequence[Sequence[Explained]], terminal: Terminal = console) -> None:
    from specdec_hf.cli.trace import legend, marks_of, styled

    marks = marks_of(terminal)
    for number, said in enumerate(rounds, start=1):
        pieces = (styled(token.text.replace("\n", "↵"), token.kind, marks) for token in said)
        line = Text().join(pieces)
        terminal.print(f"{number:3} ", line, sep="", style="" if marks else None)
    terminal.print(legend(marks))


def print_table(shown: ShownTable, terminal: Terminal = console) -> None:
    """Print a table under its title, and its note."""
    _head(shown.title, terminal)
    if shown.rows:
        table = Table(box=None, padding=(0, 1 if len(shown.names) > NARROW else 2, 0, 0))
        for i, name in enumerate(shown.names):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in shown.rows:
            table.add_row(*map(visible, row))
        terminal.print(table)
    if shown.note:
        terminal.print(visible(shown.note), style="dim")


def _head(title: str, terminal: Terminal = console) -> None:
    terminal.rule(visible(title), align="left", style="dim")
