"""The last line of a command: how much speculation gained, and which option would gain more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_hf.cli.terminal import console

if TYPE_CHECKING:
    from specdec_hf.cli.compare import Turn

# Notes name arguments of `generate`; the command line has options in their place.
OPTIONS = {"guard=False": "--guard off", "guard=True": "--guard on"}
SLOWER = 0.97


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


def print_advice(line: str) -> None:
    """Print the last line of a command, unless it is empty."""
    if line:
        console.print(line, soft_wrap=True)
