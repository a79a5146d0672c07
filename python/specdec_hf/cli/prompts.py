"""Prompts from a file in the Spec-Bench format: JSON lines with ``turns``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED_PROMPTS = Path(__file__).with_name("prompts.jsonl")
STANDARD_INPUT = "-"


class PromptError(ValueError):
    """A prompt or prompt file that cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Question:
    """One conversation: the user's turns, in order."""

    name: str
    category: str
    turns: list[str]

    def __str__(self) -> str:
        return f"prompt {self.name}" if self.name else "the prompt"


def read_prompts(path: str | Path) -> list[Question]:
    """All prompts of a JSON lines file; "-" is standard input.

    Raises:
        PromptError: file unreadable or empty, or a bad line, by number.
    """
    if str(path) == STANDARD_INPUT:
        path = "standard input"
        text = read_standard_input()
    else:
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if isinstance(error, UnicodeDecodeError):
                reason = f"it is not valid UTF-8 at byte {error.start}"
            raise PromptError(f"cannot read prompt file {path}: {reason}") from error
    prompts = [
        _parse_line(path, number, line.strip("\r"))
        # Not splitlines(): JSON strings may hold U+2028 and other breaks as they are.
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"{path} holds no prompts")
    return prompts


def read_standard_input() -> str:
    """All of standard input as text.

    Raises:
        PromptError: it is closed, or not UTF-8.
    """
    if sys.stdin is None:
        raise PromptError("standard input is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"standard input is not UTF-8 text: byte {error.object[error.start]:#04x} "
            f"at {error.start}"
        ) from error


def _parse_line(path: str | Path, number: int, line: str) -> Question:
    where = f"{path} line {number}"
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
        raise PromptError(f"{where}: not usable JSON ({error})") from error
    turns = entry.get("turns") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise PromptError(f'{where}: needs "turns", a list of strings')
    if not all(turn.strip() for turn in turns):
        raise PromptError(f"{where}: empty prompt")
    name, category = str(entry.get("question_id", number)), str(entry.get("category", ""))
    for text in (name, category, *turns):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"{where}: lone surrogate {text[error.start]!a}") from error
    return Question(name, category, list(turns))
