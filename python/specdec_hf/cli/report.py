"""The output of the command line: coloured text, tables and JSON."""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from specdec_hf.cli.prompts import Question
from specdec_hf.cli.terminal import Terminal, console, visible
from specdec_hf.drafting.registry import drafters, usage
from specdec_hf.schedules.registry import SCHEDULES

if TYPE_CHECKING:
    from specdec_hf.cli.compare import Alone, Turn
    from specdec_hf.cli.speeds import Speeds

# Notes name arguments of `generate`; the command line has options in their place.
OPTIONS = {"guard=False": "--guard off", "guard=True": "--guard on"}
NARROWEST = 26  # cells beside the longest name of a table, in which words are not broken yet
NUMBERS = re.compile(r"\[\n[\s\d.,eE+-]+\]")  # no text holds a line break
SLOWER = 0.97  # speed with drafts over that without, below which another drafter is advised
CUT = {"length": "--max-new-tokens {}", "context": "the model's context"}  # by stop reason


def collect_info() -> dict[str, Any]:
    """What `info` prints, as plain values."""
    import torch

    import specdec_kernels
    from specdec_hf.heads.shipped import shipped_heads, target_name

    versions = {"python": platform.python_version(), "specdec-kernels": specdec_kernels.__version__}
    for package in ("torch", "transformers", "triton", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "versions": versions,
        "providers": specdec_kernels.providers(),
        "cpu_capability": specdec_kernels.cpu_capability(),
        "cuda_kernels": specdec_kernels.has_cuda_kernels(),
        "threads": torch.get_num_threads(),
        "drafters": _drafters(),
        "schedules": _schedules(),
        "shipped_heads": [target_name(folder) for folder in shipped_heads()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def drafter_table() -> Table:
    """The drafters that have a name."""
    return _table_of_names(_drafters())


def schedule_table() -> Table:
    """The schedules."""
    return _table_of_names(_schedules())


def _drafters() -> dict[str, str]:
    return {usage(name): entry.summary for name, entry in drafters().items()}


def _schedules() -> dict[str, str]:
    return {name: entry.summary for name, entry in SCHEDULES.items()}


def _table_of_names(summaries: dict[str, str]) -> Table:
    """Names beside their summaries, or above them where that leaves too little for words."""
    options: dict[str, Any] = {"show_header": False, "box": None, "padding": (0, 2, 0, 0)}
    if console.width - max(map(len, summaries)) < NARROWEST:
        table = Table(**options)
        for name, summary in summaries.items():
            table.add_row(Text(name, overflow="fold"))
            table.add_row(Padding(summary, (0, 0, 0, 2)))
        return table
    table = Table(Column(no_wrap=True), Column(), **options)
    for name, summary in summaries.items():
        table.add_row(Text(name), summary)
    return table


def summarize(turns: list[Turn], *, greedy: bool) -> dict[str, Any]:
    """Figures over all answers together."""
    from specdec_hf.cli.compare import speeds_of

    tokens = sum(len(turn.tokens) for turn in turns)
    drafted = sum(turn.stats.drafted for turn in turns)
    accepted = sum(turn.stats.accepted for turn in turns)
    rounds = sum(turn.stats.rounds for turn in turns)
    summary: dict[str, Any] = {
        "answers": len(turns),
        "drafter": "; ".join(sorted({turn.stats.drafter for turn in turns})),
        "lossless": all(turn.stats.lossless for turn in turns),
        "tokens": tokens,
        **speeds_of(turns).to_dict(),
        "mean_acceptance_length": tokens / rounds,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "drafted": drafted,
        "accepted": accepted,
        "rounds": rounds,
        "notes": sorted({note for turn in turns for note in turn.stats.remarks}),
    }
    if all(turn.identical is not None for turn in turns):
        name = "greedy_outputs_identical" if greedy else "sampled_outputs_identical"
        summary[name] = all(turn.identical for turn in turns)
    return summary


def print_turn(
    tokenizer: Any, prompt: Question, text: str, turn: Turn, *, drafts: bool = False
) -> None:
    """Print the user's text, the answer and its figures.

    Args:
        tokenizer: of the answer.
        prompt: which has the text.
        text: the user's.
        turn: the answer.
        drafts: whether its tokens are marked, and rejected drafts shown.
    """
    print_title(prompt, text, console)
    print_answer(tokenizer, turn, drafts=drafts)
    print_figures(turn, console)


def print_title(prompt: Question, text: str, terminal: Terminal) -> None:
    """Print one line of the user's text, below a rule with the name of its prompt."""
    title = visible(" ".join(text.split()))
    longest = max(20, terminal.width - 1)
    title = title if len(title) <= longest else title[: longest - 1] + "…"
    terminal.rule(Text(visible(prompt.category or str(prompt))), align="left", style="dim")
    terminal.print(title, style="bold")


def print_answer(tokenizer: Any, turn: Turn, *, drafts: bool) -> None:
    """Print the text of an answer, or with ``drafts`` what became of them."""
    from specdec_hf.cli.trace import marks_of, render

    if drafts:
        marks = marks_of(console)
        console.print(render(tokenizer, turn.steps, prompt=turn.prompt, marks=marks))
    else:
        console.print(visible(turn.text(tokenizer)))


def print_text(text: str, *, first: bool) -> None:
    """Write a text to a pipe, unchanged, and a line feed; an empty line parts it from the last."""
    console.write(f"{text}\n" if first else f"\n{text}\n")


def print_figures(turn: Turn, terminal: Terminal) -> None:
    """Print the figures of an answer, and the remarks of the loop."""
    whole = None if terminal.is_terminal else True  # lines of a pipe are not broken
    terminal.print(figures(turn), style="dim", soft_wrap=whole)
    for note in turn.stats.notes:
        terminal.print(f"note: {in_options(note)}", style="dim", soft_wrap=whole)


def print_example(tokenizer: Any, turns: Sequence[Turn]) -> None:
    """Print with its drafts the answer for which most of them were accepted."""
    turn = max(turns, key=lambda turn: turn.stats.accepted)
    if turn.stats.drafted:
        title = f"how answer {turns.index(turn) + 1} of {len(turns)} came about"
        console.rule(title, align="left", style="dim")
        print_answer(tokenizer, turn, drafts=True)
        print_legend()


def print_legend() -> None:
    """Print what the colours or marks of tokens mean."""
    from specdec_hf.cli.trace import legend, marks_of

    console.print(legend(marks_of(console)))


def print_alone(answers: Sequence[Alone]) -> None:
    """Print texts and speeds of models that answered by themselves."""
    for one in answers:
        console.print(visible(f"{one.name} alone"), style="bold")
        console.print(visible(one.text), soft_wrap=True)
        speed = one.tokens / one.seconds
        console.print(f"{one.tokens} tokens, {speed:.1f} tokens/s", style="dim")


def figures(turn: Turn) -> str:
    """One line of figures; those of drafts only where one was accepted."""
    line = f"{len(turn.tokens)} tokens; {turn.speeds}"
    if turn.stats.accepted:
        line += f"; {_of_drafts(turn)}"
    ended = turn.stats.sequences[0]
    if ended.stop_reason in CUT:
        line += f"; cut at {CUT[ended.stop_reason].format(ended.new_tokens)}"
    if turn.seed is not None:
        line += f"; seed {turn.seed}"
    return line


def _of_drafts(turn: Turn) -> str:
    length, rate = turn.stats.mean_acceptance_length, turn.stats.draft_acceptance_rate
    return f"{length:.2f} tokens a round, {rate:.0%} of drafts accepted"


def print_summary(summary: dict[str, Any], speeds: Speeds, terminal: Terminal) -> None:
    """Print the figures of all answers."""
    terminal.rule("summary", align="left", style="dim")
    table = Table("", Column(overflow="fold"), show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("model", f"{summary['model']}, {summary['dtype']}, {summary['device']}")
    table.add_row("drafter", summary["drafter"])
    if not summary["lossless"]:
        without = f" without the {summary['ablate']}" if summary["ablate"] else ""
        table.add_row("rule", f"{summary['rule']}{without}, lossy")
    for name, speed, ratio in speeds.rows:
        times = "" if ratio is None else f", {ratio:.2f} times model.generate"
        table.add_row(f"tokens/s {name}", f"{speed:.1f}{times}")
    if speeds.speculation is not None:
        table.add_row("speculation", f"{speeds.speculation:.2f} times without drafts")
    if summary["drafted"]:
        table.add_row("tokens per round", f"{summary['mean_acceptance_length']:.2f}")
        accepted = f"{summary['accepted']} of {summary['drafted']}"
        table.add_row("drafts accepted", f"{summary['draft_acceptance_rate']:.0%} ({accepted})")
    else:
        table.add_row("drafts accepted", "nothing was drafted")
    for name in ("greedy", "sampled"):
        identical = summary.get(f"{name}_outputs_identical")
        if identical is not None:
            table.add_row(f"{name} outputs identical", "yes" if identical else "NO")
    terminal.print(table)


def in_options(note: str) -> str:
    """A note of the library in the words of the command line."""
    for argument, option in OPTIONS.items():
        note = note.replace(argument, option)
    return note


def verdict(turns: Sequence[Turn]) -> str:
    """One line on the speed of all answers together; empty where there is nothing to say."""
    from specdec_hf.cli.compare import NO_DRAFTER, speeds_of

    stats, speeds = [turn.stats for turn in turns], speeds_of(turns)
    parts = [speeds.conclusion()]
    tokens = sum(len(turn.tokens) for turn in turns)
    if speeds.accepted:
        rounds = sum(one.rounds for one in stats)
        line = f"{tokens / rounds:.2f} tokens a round"
        if speeds.speculation is not None and speeds.speculation < SLOWER:
            rate = speeds.accepted / speeds.drafted
            line += f", {rate:.0%} of drafts accepted; another --drafter may gain"
        parts.append(line)
    elif speeds.drafted:
        parts.append("another --drafter may gain")
    elif any(one.drafter != NO_DRAFTER for one in stats):
        waited = any("guard=False" in note for one in stats for note in one.notes)
        why, advice = "no draft was found", "--drafter help lists others"
        if waited:
            why, advice = "the guard waited", "--guard off drafts from the second round"
        parts += [f"nothing was drafted in {tokens} tokens, because {why}", advice]
    return "; ".join(filter(None, parts))


def write_json(
    path: Path | None,
    content: dict[str, Any],
    *,
    quiet: bool = False,
    terminal: Terminal = console,
) -> None:
    """Write a report where a path was given, with numbers in a line; say so unless ``quiet``."""
    if path is not None:
        text = json.dumps(content, indent=1, ensure_ascii=False)
        path.write_text(NUMBERS.sub(_in_a_line, text) + "\n", encoding="utf-8")
        if not quiet:
            terminal.print(visible(f"wrote {path}"), style="dim")


def _in_a_line(numbers: re.Match[str]) -> str:
    return " ".join(numbers[0].split()).replace("[ ", "[").replace(" ]", "]")
