"""A stream of text in lines that end between words, as wide as the terminal."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.text import Text

TAB = 8
# Chinese and Japanese have no blanks between words: a line may end after each of their characters.
_PARTS = re.compile(r"\n|[^\S\n]+|[⺀-￿]|[^\s⺀-￿]+")


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
