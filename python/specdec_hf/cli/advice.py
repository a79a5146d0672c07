"""The last lines of a command: how much speculation gained, and which option would gain more."""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec_hf.cli.terminal import console
from specdec_hf.drafting.registry import DRAFTERS

if TYPE_CHECKING:
    from specdec_hf.cli.compare import Turn

# Notes name arguments of `generate`; the command line has options in their place.
OPTIONS = {"guard=False": "--guard off", "guard=True": "--guard on"}
SLOWER = 0.97
COMPILE = "--compile makes forwards faster; it warms up once, for about 20 s"
COMPILE_FROM = 64  # tokens; a process that generates fewer ends before it gains anything


def in_options(note: str) -> str:
    """A note of the library in the words of the command line."""
    for argument, option in OPTIONS.items():
        note = note.replace(argument, option)
    return note


def verdict(turns: Sequence[Turn]) -> str:
    """One line on the speed of all answers together; empty where there was no drafter."""
    stats = [turn.stats for turn in turns]
    if all(one.drafter == "none" for one in stats):
        return ""
    drafted, accepted, rounds = (
        sum(getattr(one, name) for one in stats) for name in ("drafted", "accepted", "rounds")
    )
    tokens = sum(len(turn.tokens) for turn in turns)
    waited = any("guard=False" in note for one in stats for note in one.notes)
    if not drafted and waited:
        return (
            f"speculation: nothing was drafted in {tokens} tokens, because the guard waited; "
            "--guard off drafts from the second round"
        )
    if not drafted:
        return (
            f"speculation: nothing was drafted in {tokens} tokens, because no draft was found; "
            "--drafter help lists others"
        )
    length = f"{1 + accepted / rounds:.2f} tokens a round"
    if not turns[0].baseline:
        return f"speculation: {length}"
    plain = sum(len(turn.baseline_tokens) for turn in turns)
    plain_seconds = sum(turn.baseline_seconds for turn in turns)
    ratio = tokens / sum(turn.seconds for turn in turns) / (plain / plain_seconds)
    line = f"speculation: {ratio:.2f} times as fast as {turns[0].baseline}, {length}"
    if ratio < SLOWER:
        line += f"; {accepted / drafted:.0%} of drafts accepted, another --drafter may gain"
    return line


def compile_hint(turns: Sequence[Turn], model: Any) -> str:
    """One line where ``--compile`` would have served these answers, else empty."""
    from specdec_hf.runner.compiled.twin import twin_reason

    for stats in (turn.stats for turn in turns):
        entry = DRAFTERS.get(stats.drafter)
        if stats.compiled or stats.cache != "spec" or (entry and entry.makes_forward):
            return ""
    few = sum(len(turn.tokens) for turn in turns) < COMPILE_FROM
    if few or model.device.type != "cpu" or twin_reason(model) is not None:
        return ""
    return f"hint: {COMPILE}"


def print_advice(*lines: str) -> None:
    """Print the last lines of a command that are not empty."""
    for line in filter(None, lines):
        console.print(line, soft_wrap=True)
