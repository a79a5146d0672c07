"""Coloured text: what was drafted, corrected or added (Leviathan et al. 2023, Figure 1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.text import Text

from specdec_hf.decode.streaming import Kind, Step, text_pieces

STYLES: dict[Kind, str] = {"accepted": "green", "corrected": "blue", "bonus": "", "plain": ""}


def render(tokenizer: Any, steps: Iterable[Step], row: int = 0) -> Text:
    """The generated text of one row: accepted drafts green, corrections blue, the rest plain."""
    tokens: list[int] = []
    kinds: list[Kind] = []
    for step in steps:
        if step.row == row:
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
        ("corrected", STYLES["corrected"]),
        "  bonus or plain",
    )
