"""Ctrl-C as one line and exit code 130, at any moment after this module is loaded.

It is loaded before everything else, so it imports next to nothing.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

EXIT = 130  # 128 + SIGINT, as shells report it
LINE = b"error: interrupted\n"


class InterruptState:
    """Two flags that a signal handler shares with the program, so that the line is printed once."""

    seen = False
    told = False


def is_interruption(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error, which a library may have turned into one of its own."""
    return InterruptState.seen or isinstance(error, KeyboardInterrupt)


def forget() -> None:
    """Go on after an interruption that was dealt with."""
    InterruptState.seen = False


def tell() -> None:
    """Print the line, once. Not through the console, which may hold a lock at this moment."""
    if not InterruptState.told:
        InterruptState.told = True
        os.write(2, LINE)


@contextmanager
def in_one_line() -> Iterator[None]:
    """Run the block; Ctrl-C ends the process with one line, whatever it interrupts."""
    signal.signal(signal.SIGINT, _on_signal)
    sys.unraisablehook = _on_unraisable
    atexit.register(_on_exit)  # the first one, which is called last
    try:
        yield
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if is_interruption(error):
            tell()
            raise SystemExit(EXIT) from None
        raise
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done; only Python's exit is left


def _on_signal(number: int, frame: FrameType | None) -> None:
    if InterruptState.seen:  # the first one is being dealt with, too slowly for the user
        _leave()
    InterruptState.seen = True
    raise KeyboardInterrupt


def _on_unraisable(error: Any) -> None:
    """Where Python cannot raise, as in a destructor, the interruption would be lost."""
    if issubclass(error.exc_type, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(error)


def _on_exit() -> None:
    """Where exec() was interrupted, Python would end by the signal, whatever the exit code."""
    if InterruptState.told:
        sys.stdout.flush()
        os._exit(EXIT)


def _leave() -> None:
    tell()
    os._exit(EXIT)
