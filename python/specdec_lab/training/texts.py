"""The file of conversations: JSON lines, written as they end; an interrupted run goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specdec_lab.training.conversations import HELD_OUT, TrainingText


def read_conversations(path: Path) -> list[TrainingText]:
    """The conversations of a file in the order of their numbers; none where it is missing.

    A last line that was cut by an interruption is left out.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(TrainingText(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return sorted(found, key=lambda one: one.number)


def append_conversations(path: Path, conversations: Iterable[TrainingText]) -> Iterator[int]:
    """Append conversations to a file as they come; yields how many tokens each has."""
    torn = path.exists() and path.read_bytes()[-1:] != b"\n"
    with path.open("a", encoding="utf-8") as file:
        if torn:
            file.write("\n")
        for one in conversations:
            file.write(json.dumps(asdict(one)) + "\n")
            file.flush()
            yield len(one.tokens)


def cut_texts(texts: Iterable[list[int]], length: int, most: int) -> Iterator[TrainingText]:
    """Given texts in pieces of at most ``length`` tokens, which hold no answer.

    Of 20 texts or more every 20th is held out; of fewer, the last 20th of each. So training reads
    nothing beside a piece that is held out.

    Args:
        texts: tokens of each.
        length: most tokens of a piece.
        most: tokens of all texts; those that follow are left out.
    """
    taken: list[list[int]] = []
    for text in filter(None, texts):
        taken.append(text[:most])
        most -= len(text)
        if most <= 0:
            break
    numbers = itertools.count()
    for index, text in enumerate(taken):
        if len(taken) >= HELD_OUT:
            end = 0 if _is_every_20th(index) else len(text)
        else:
            end = len(text) - len(text) // HELD_OUT
        for part, held_out in ((text[:end], False), (text[end:], True)):
            for first in range(0, len(part), length):
                piece = part[first : first + length]
                if len(piece) > 1:
                    yield TrainingText(next(numbers), piece, 0, held_out)


def is_held_out(conversation: TrainingText) -> bool:
    """Whether a conversation is left out of training, to measure on."""
    if conversation.held_out is not None:
        return conversation.held_out
    return _is_every_20th(conversation.number)


def holds_out_some(conversations: Sequence[TrainingText]) -> bool:
    """Whether some of the conversations are held out, and some are not."""
    return len({is_held_out(one) for one in conversations}) == 2


def check_held_out(conversations: Sequence[TrainingText], needed: str) -> None:
    """Raises ValueError where nothing is held out, or all is."""
    if not holds_out_some(conversations):
        tokens = sum(len(one.tokens) for one in conversations)
        raise ValueError(
            f"the texts must be at least {HELD_OUT}, or given and long, because a {HELD_OUT}th is "
            f"held out, got {len(conversations)} of {tokens} tokens: {needed}"
        )


def check_prompts(prompts: Sequence[str]) -> None:
    """Raises ValueError for prompts of which none is held out."""
    if 0 < len(prompts) < HELD_OUT:
        raise ValueError(
            f"the prompts must be at least {HELD_OUT}, because the text of a {HELD_OUT}th is held "
            f"out, got {len(prompts)}"
        )


def _is_every_20th(number: int) -> bool:
    return number % HELD_OUT == HELD_OUT - 1


def draft_vocabulary(
    conversations: Iterable[TrainingText], size: int, vocab_size: int
) -> NDArray[np.int64]:
    """The ``size`` most frequent tokens, ascending; of equal ones those of lower ids."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for one in conversations:
        np.add.at(counts, one.tokens, 1)
    return np.sort(np.argsort(-counts, kind="stable")[:size])
