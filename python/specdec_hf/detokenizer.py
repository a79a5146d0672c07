"""The text of tokens as they come, and the stop strings in it.

A piece is what a token adds to the text: it is decoded with the tokens before it, because decoders
treat the beginning of a text in their own way (SentencePiece takes away the blank before its first
word). A piece is never taken back. A character whose bytes come in several tokens belongs to the
last of them; the others have an empty piece and are open until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what bytes without their character are decoded to
MAX_PART = 3  # bytes, and so tokens, of a character that is not complete
MAX_OPEN = 8  # tokens; of more of them all but the last `MAX_PART` are no character
CONTEXT = 4  # tokens of the prompt that a piece is decoded with, enough for a character


class Detokenizer:
    """The pieces of tokens behind a prompt, each in time that does not grow with the text.

    Special tokens have no piece where they are skipped. Nothing is cleaned up.

    Args:
        tokenizer: of Transformers, fast or not.
        prompt: token ids; the text begins anew behind a special token.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._special: dict[int, bool] = {}
        self._ids: list[int] = []  # without special tokens
        # For each number of tokens: how many ids there are, the first that the next piece is
        # decoded with, the first open one, and the characters of those before it.
        self._states = [(0, 0, 0, 0)]
        begin = len(prompt)
        while begin > max(len(prompt) - CONTEXT, 0) and not self.is_special(prompt[begin - 1]):
            begin -= 1
        for token in prompt[begin:]:
            self.add(token)
        self._states = self._states[-1:]

    def is_special(self, token: int) -> bool:
        """Whether a token has no text wherever it is, as special tokens that are skipped."""
        if token not in self._special:
            unknown = self._tokenizer.convert_ids_to_tokens(token) is None
            named = unknown or bool(self._decode([token], skips=False))
            self._special[token] = named and not self._decode([token])
        return self._special[token]

    def add(self, token: int) -> str:
        """Append a token; returns its piece."""
        count, first, opened, before = self._states[-1]
        if self.is_special(token):
            self._states.append(self._states[-1])
            return ""
        text = self._behind(token)
        end = count + 1
        if not text or text.endswith(INCOMPLETE):
            if end - opened < MAX_OPEN:
                self._states.append((end, first, opened, before))
                return ""
            end -= MAX_PART
            text = self._decode(self._ids[first:end])[before:]
        before = len(self._decode(self._ids[opened:end]))
        self._states.append((count + 1, opened, end, before))
        return text

    @property
    def num_open(self) -> int:
        """How many of the last tokens have no piece yet, special tokens aside."""
        count, _, opened, _ = self._states[-1]
        return count - opened

    def rest(self) -> str:
        """The text of open tokens, where no other token follows."""
        return self._behind()

    def name(self, token: int) -> str:
        """The text of a token in the next place: its own name, or � for a part of a character."""
        if self.is_special(token):
            return self._decode([token], skips=False)
        count, _, opened, _ = self._states[-1]
        alone = self._decode([token])
        return alone if opened < count or alone.endswith(INCOMPLETE) else self._behind(token)

    def truncate(self, count: int) -> None:
        """Take back all but the first tokens."""
        del self._states[count + 1 :]

    def _behind(self, *tokens: int) -> str:
        """What the open ids and tokens have behind the text of those before them."""
        count, first, _, before = self._states[-1]
        self._ids[count:] = tokens
        return self._decode(self._ids[first:])[before:]

    def _decode(self, ids: Sequence[int], *, skips: bool | None = None) -> str:
        text: str = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=self._skips if skips is None else skips,
            clean_up_tokenization_spaces=False,  # it would change what was given before
        )
        return text


def decode_behind(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of tokens behind a prompt."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join([*map(detokenizer.add, tokens), detokenizer.rest()])


class StopStrings:
    """Strings that end a text, looked for while it grows (Knuth, Morris and Pratt 1977).

    A place is a tuple, of which a caller may keep earlier ones: for each string, how many of its
    characters the text ends with, as far as the string can still become complete. A string that is
    complete stays so.

    Args:
        strings: each of at least one character.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self.strings = tuple(strings)
        self.start = (0,) * len(self.strings)
        # Of each beginning of each string, the longest end that begins the string, too.
        self._borders = [[0, 0] for _ in self.strings]

    def follow(self, places: tuple[int, ...], text: str) -> tuple[int, ...]:
        """The places behind some more text."""
        return tuple(self._follow(*one, text) for one in enumerate(places))

    def is_complete(self, places: tuple[int, ...]) -> bool:
        """Whether the text has one of the strings."""
        return any(n == len(one) for n, one in zip(places, self.strings, strict=True))

    def cut(self, text: str) -> int:
        """Where the first of the strings in a text begins; its length if there is none."""
        return min((n for one in self.strings if (n := text.find(one)) >= 0), default=len(text))

    def _follow(self, index: int, place: int, text: str) -> int:
        string, at = self.strings[index], 0
        while at < len(text) and place < len(string):
            if text[at] == string[place]:
                at, place = at + 1, place + 1
            elif place:
                place = self._border(index, place)
            else:
                at += 1
        return place

    def _border(self, index: int, place: int) -> int:
        """Made as far as a text has come, since a string may be longer than any text."""
        string, borders = self.strings[index], self._borders[index]
        while len(borders) <= place:
            last, border = string[len(borders) - 1], borders[-1]
            while border and string[border] != last:
                border = borders[border]
            borders.append(border + (string[border] == last))
        return borders[place]


class StopCriterion:
    """Whether the text of new tokens has a stop string. A function of the tokens alone.

    Tokens that begin as those of the call before are decoded from where they differ.

    Args:
        tokenizer, prompt: as in `Detokenizer`; the text of the prompt is not looked at.
        stop: as in `StopStrings`.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenizer, self._stop = Detokenizer(tokenizer, prompt), StopStrings(stop)
        self._places = [self._stop.start]  # for each number of tokens
        self._ids = np.empty(0, dtype=np.int64)

    def __call__(self, new: Sequence[int] | NDArray[np.int64]) -> bool:
        ids = np.array(new, dtype=np.int64)
        shared = min(len(ids), len(self._ids))
        unlike = np.flatnonzero(ids[:shared] != self._ids[:shared])
        count = int(unlike[0]) if len(unlike) else shared
        self._detokenizer.truncate(count)
        del self._places[count + 1 :]
        for token in ids[count:].tolist():
            piece = self._detokenizer.add(token)
            self._places.append(self._stop.follow(self._places[-1], piece))
        self._ids = ids
        return self._stop.is_complete(self._places[-1])
