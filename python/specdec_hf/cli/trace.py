"""Generated text coloured by how each token came about (Leviathan et al. 2023, Figure 1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.text import Text

from specdec_hf.decode.streaming import Kind, Step, text_pieces

STYLES: dict[Kind, str] = {"accepted": "green", "recovered": "blue", "bonus": "", "plain": ""}


def render(tokenizer: Any, steps: Iterable[Step], sequence: int = 0) -> Text:
    """The text of one sequence: accepted drafts green, recovered tokens blue, others plain."""
    tokens: list[int] = []
    kinds: list[Kind] = []
    for step in steps:
        if step.sequence == sequence:
            tokens += step.tokens
            kinds += step.kinds
    text = Text()
    for piece, kind in text_pieces(tokenizer, tokens, kinds):
        text.append(piece, style=STYLES[kind])
    return text


def legend() -> Text:
    """One line that explains the colours."""
    return Text.assemble(
        ("drafted and accepted", STYLES["accepted"]),
        "  ",
        ("recovered after a rejection", STYLES["recovered"]),
        "  bonus or plain",
    )
