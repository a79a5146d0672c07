"""The consoles of the command line, its exit codes, and its one line for each error.

Both consoles print text as it is: no markup and no emoji codes. `visible` replaces the control
characters of what they print; `Terminal.write` keeps them, for pipes.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.text import Text

from specdec_hf.cli import interrupt

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = interrupt.EXIT

TAB = 8
# Chinese and Japanese have no blanks between words: a line may end after each of their characters.
_PARTS = re.compile(r"\n|[^\S\n]+|[⺀-￿]|[^\s⺀-￿]+")

# Control characters but tab and line feed, which would move the cursor or colour the terminal, and
# surrogates, which are what bytes that are no UTF-8 are read as.
_CONTROLS = {
    code: chr(0x2400 + code) if code < 0x20 else "\N{SYMBOL FOR DELETE}"
    for code in (*range(0x20), 0x7F)
    if chr(code) not in "\t\n"
} | dict.fromkeys((*range(128, 160), *range(0xD800, 0xE000)), "�")


class Terminal(Console):
    """A console for text that users and models wrote."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property
    def has_colour(self) -> bool:
        """Whether colours can be seen: not in a pipe, with NO_COLOR or on a dumb terminal."""
        shown = self.is_terminal and not self.is_dumb_terminal
        return shown and not self.no_color and self.color_system is not None

    def write(self, text: str) -> None:
        """Write a text unchanged, with its tabs and control characters: for a pipe or a file."""
        self.file.write(text)
        self.file.flush()

    def on_broken_pipe(self) -> None:
        """The reader has gone (``| head -1``): an error like others, told by the exit code."""
        raise BrokenPipeError


console = Terminal()
errors = Terminal(stderr=True, soft_wrap=True)


def bar(*columns: ProgressColumn) -> Progress:
    """A bar on standard error, where that is a terminal."""
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_interactive)


def visible(text: str) -> str:
    """The text with its control characters and surrogates as symbols."""
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


class WordWrap:
    """Breaks lines of a text that comes in pieces; a word is held back until it is complete.

    Args:
        width: of a line in cells; None breaks none, and holds nothing back.
    """

    def __init__(self, width: int | None) -> None:
        self.width = width
        self._column = 0
        self._gap, self._word = Text(), Text()

    def feed(self, piece: Text) -> Text:
        """What can be printed once the text goes on with this piece."""
        if self.width is None:
            return piece
        ready = Text()
        for part in _PARTS.finditer(piece.plain):
            text = piece[part.start() : part.end()]
            if text.plain == "\n":
                ready.append_text(self.rest()).append("\n")
                self._column = 0
            elif text.plain.isspace():
                ready.append_text(self._end_of_word())
                self._gap.append_text(text)
            else:
                if text.plain >= "⺀":
                    ready.append_text(self._end_of_word())
                self._word.append_text(text)
        return ready

    def rest(self) -> Text:
        """What was held back, at the end of the text or of a line."""
        ready = self._end_of_word().append_text(self._gap)
        self._gap = Text()
        return ready

    def _end_of_word(self) -> Text:
        if not self._word:
            return Text()
        assert self.width is not None
        gap, word = self._gap, self._word
        self._gap, self._word = Text(), Text()
        size = cell_len(word.plain)
        column = self._column + cell_len(gap.plain) + (TAB - 1) * gap.plain.count("\t")
        if self._column and column + size > self.width:
            gap, column = Text("\n"), 0
        self._column = (column + size) % self.width if size > self.width else column + size
        return gap.append_text(word)
