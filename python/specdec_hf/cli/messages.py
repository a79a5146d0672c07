"""The messages of a ``chat``: what the user types or pastes, or the lines of standard input."""

from __future__ import annotations

import re
import select
import sys
from collections.abc import Iterator
from types import ModuleType

from specdec_hf.cli.checks import check_text
from specdec_hf.cli.terminal import console, errors, fail, visible

PROMPT = "> "
COMMANDS = ("/help", "/reset", "/exit")
# A path such as /etc/hosts at the beginning of a message is none.
_COMMAND = re.compile(r"/\w*(?!\S)")
PASTE_SECONDS = 0.05  # within which the lines of a paste follow one another


def read_messages(interactive: bool) -> Iterator[str]:
    """The user's messages that are not blank, and the commands but ``/exit``, which ends them."""
    bracketed = interactive and sys.stdout.isatty() and _reads_brackets()
    while True:
        try:
            line = _typed(bracketed) if interactive else _next_line()
        except EOFError:
            if interactive:
                console.print()
            return
        except UnicodeDecodeError:
            fail("standard input is not UTF-8 text")
        text = line.strip()
        if text == "/exit":
            return
        if text:
            check_text("the message", text)
            if not interactive:
                console.print(visible(f"{PROMPT}{text}"), style="bold", soft_wrap=True)
            yield text


def refused(text: str) -> bool:
    """Whether a message begins like a command and is none, which is told in one line."""
    found = _COMMAND.match(text)
    if found is None or text in COMMANDS:
        return False
    errors.print(f"error: commands are {', '.join(COMMANDS)}, alone in a message, got {found[0]}")
    return True


def _reads_brackets() -> bool:
    """Let `input` edit lines; whether it takes a paste of several lines as one text.

    Terminals put a paste in brackets for programs that ask for it, as GNU readline does.
    """
    try:
        import readline  # noqa: PLC0415  # it changes the terminal
    except ImportError:  # Windows
        return False
    return _brackets(readline)


def _brackets(readline: ModuleType) -> bool:
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def _typed(bracketed: bool) -> str:
    text = input(PROMPT)
    while not bracketed and sys.platform != "win32":
        if not select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            break
        text += f"\n{input()}"
    return text


def _next_line() -> str:
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8-sig")
