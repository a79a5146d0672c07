"""The consoles of the command line, its exit codes, and its one line for each error.

Both consoles print text as it is: no markup, no emoji codes, no control characters.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn

from specdec_hf.cli import interrupt

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = interrupt.EXIT

# Control characters but tab and line feed, which would move the cursor or colour the terminal.
_CONTROLS = {
    code: chr(0x2400 + code) if code < 0x20 else "\N{SYMBOL FOR DELETE}"
    for code in (*range(0x20), 0x7F)
    if chr(code) not in "\t\n"
} | dict.fromkeys(range(128, 160), "�")


class Terminal(Console):
    """A console for text that users and models wrote."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property
    def has_colour(self) -> bool:
        """Whether colours can be seen: not in a pipe, with NO_COLOR or on a dumb terminal."""
        shown = self.is_terminal and not self.is_dumb_terminal
        return shown and not self.no_color and self.color_system is not None

    def on_broken_pipe(self) -> None:
        """The reader has gone (``| head -1``): an error like others, told by the exit code."""
        raise BrokenPipeError


console = Terminal()
errors = Terminal(stderr=True, soft_wrap=True)


def bar(*columns: ProgressColumn) -> Progress:
    """A bar on standard error, where that is a terminal."""
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_interactive)


def visible(text: str) -> str:
    """The text with its control characters as symbols."""
    return text.translate(_CONTROLS)


def fail(message: str, code: int = WRONG_INPUT) -> NoReturn:
    """One clear line on stderr, and the exit code."""
    if code == INTERRUPTED:
        interrupt.tell()
    else:
        errors.print(visible(f"error: {' '.join(message.split())}"))
    raise typer.Exit(code)


def prepare_streams() -> None:
    """Let every character be printed: one that the encoding lacks becomes a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell, as in `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for good
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def close_output() -> bool:
    """Flush the output before Python does, which would print a traceback; False if it is lost."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
