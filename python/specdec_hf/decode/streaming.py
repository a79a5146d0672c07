"""What the loop hands out round by round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Kind = Literal["accepted", "corrected", "bonus", "plain"]


@dataclass(frozen=True)
class Step:
    """What one round added to one row, after every cut.

    Attributes:
        row: index in the batch.
        tokens: the new token ids, in order.
        kinds: how each came about: "accepted" (drafted and accepted), "corrected" (took the place
            of a rejected draft), "bonus" (followed a fully accepted draft), "plain" (nothing was
            drafted).
        logprobs: log probability of each under the filtered target.
        finished: why the row ended with this step, "" while it goes on.
    """

    row: int
    tokens: list[int]
    kinds: list[Kind]
    logprobs: list[float]
    finished: str = ""

    @property
    def from_draft(self) -> list[bool]:
        """Which of the tokens were drafted."""
        return [kind == "accepted" for kind in self.kinds]


class Streamer(Protocol):
    """Hugging Face's streamer interface."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


def put_step(streamer: Streamer | None, step: Step) -> None:
    """Give a step to a streamer token by token, as plain ``generate`` would."""
    if streamer is not None:
        for token in step.tokens:
            streamer.put(torch.tensor([token]))


def step_kinds(kept: int, accepted: int, drafted: int) -> list[Kind]:
    """Kinds of the first ``kept`` of a round's ``accepted + 1`` tokens; it drafted ``drafted``."""
    last: Kind = "plain" if drafted == 0 else "bonus" if accepted == drafted else "corrected"
    drafts: list[Kind] = ["accepted"] * accepted
    return [*drafts, last][:kept]


def text_pieces(tokenizer: Any, tokens: list[int], kinds: list[Kind]) -> list[tuple[str, Kind]]:
    """Text of each run of tokens of one kind; a character split over tokens goes with the last."""
    pieces: list[tuple[str, Kind]] = []
    done = ""
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and kinds[end] == kinds[end - 1]:
            continue
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(tokens):
            continue
        pieces.append((text[len(done) :], kinds[end - 1]))
        done = text
    return [piece for piece in pieces if piece[0]]
