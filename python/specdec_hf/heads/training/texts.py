"""The file of conversations: JSON lines, written as they end; an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specdec_hf.heads.training.sampling import Conversation

HELD_OUT = 20  # one conversation of so many is held out


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a file in the order of their numbers; none where it is missing.

    A last line that was cut by an interruption is left out.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(Conversation(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return sorted(found, key=lambda one: one.number)


def append_conversations(path: Path, conversations: Iterable[Conversation]) -> Iterator[int]:
    """Append conversations to a file as they come; yields how many tokens each has."""
    torn = path.exists() and path.read_bytes()[-1:] != b"\n"
    with path.open("a", encoding="utf-8") as file:
        if torn:
            file.write("\n")
        for one in conversations:
            file.write(json.dumps(asdict(one)) + "\n")
            file.flush()
            yield len(one.tokens)


def cut_texts(tokens: Iterable[list[int]], length: int) -> Iterator[Conversation]:
    """Given texts as conversations of at most ``length`` tokens; they hold no answer."""
    number = 0
    for text in tokens:
        for first in range(0, len(text), length):
            piece = text[first : first + length]
            if len(piece) > 1:
                yield Conversation(number, piece, 0)
                number += 1


def is_held_out(conversation: Conversation) -> bool:
    """Whether a conversation is left out of training, to measure on."""
    return conversation.number % HELD_OUT == HELD_OUT - 1


def draft_vocabulary(
    conversations: Iterable[Conversation], size: int, vocab_size: int
) -> NDArray[np.int64]:
    """The ``size`` most frequent tokens, ascending; of equal ones those of lower ids."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for one in conversations:
        np.add.at(counts, one.tokens, 1)
    return np.sort(np.argsort(-counts, kind="stable")[:size])
