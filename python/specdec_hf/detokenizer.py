"""The text of tokens as they come, and the stop strings in it.

Terms:

- complete text: what the tokens stand for, without a character whose bytes are not all there.
- open tokens: the last ones, whose text the next token may still change.
- context: the tokens before the open ones, with which these are decoded. Decoders treat the
  beginning of a text in their own way: SentencePiece takes away the blank before its first word.
- byte run: byte tokens of SentencePiece ("<0xE4>") that follow one another. Its decoders make text
  of all of them or of none, so its complete text may be taken back until another token ends it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what bytes without their character are decoded to
BYTE = re.compile("<0x([0-9A-F]{2})>")
MAX_PART = 3  # bytes, and so tokens, of a character that is not complete
MAX_OPEN = 8  # tokens that are open before the first of them are settled apart


class _Run(NamedTuple):
    """A byte run: the token before it, its length, its incomplete character, and whether it has
    bytes that are no text."""

    start: int
    size: int
    part: bytes
    broken: bool

    @property
    def unfinished(self) -> bool:
        return bool(self.part) and not self.broken


class _State(NamedTuple):
    """What is known behind a token; tokens are numbered from 1, and 0 is the end of the prompt.

    Attributes:
        since, added: the complete text is that behind token ``since`` and what this adds to it.
        length: of the complete text, in characters.
        final: the last token whose complete text no other token changes.
        rest: what a decoder makes of the bytes behind the complete text.
        context, prefix: tokens before the open ones, and their text.
        first: index of the first open token.
        settled: characters of the text before it.
        num_open: characters of the text of the open tokens.
        run: the byte run that the token belongs to.
    """

    since: int = 0
    added: str = ""
    length: int = 0
    final: int = 0
    rest: str = ""
    context: tuple[int, ...] = ()
    prefix: str = ""
    first: int = 0
    settled: int = 0
    num_open: int = 0
    run: _Run | None = None


class Detokenizer:
    """The text of tokens behind a prompt, in time linear in their number; its end can be removed.

    It is what a decode of the prompt and the tokens has behind that of the prompt. Where special
    tokens are skipped, a text behind one begins anew. Nothing is cleaned up.

    Args:
        tokenizer: of Transformers, fast or not.
        prompt: token ids; only the last ones are read.
        skip_special_tokens: whether special tokens are left out of the text.

    Attributes:
        tokens: those that were added.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self.tokens: list[int] = []
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._known: dict[int, tuple[str | None, int | None]] = {}
        self._joins_bytes = _joins_bytes(tokenizer)
        self._states = [_State()]
        tail: list[int] = []
        for token in reversed(prompt):
            if self._learned(token)[0] is None or len(tail) > MAX_PART:
                break
            tail.insert(0, token)
        for token in tail:
            self.add(token)
        last = self._states[-1]
        context = (*last.context, *self.tokens[last.first :])
        run = last.run
        run = _Run(0, 0, run.part, False) if run is not None and run.unfinished else None
        self._states = [_State(context=context, prefix=self._decode(context), run=run)]
        self.tokens.clear()

    @property
    def final(self) -> int:
        """How many tokens there are up to the last one whose complete text nothing changes."""
        return self._states[-1].final

    @property
    def text(self) -> str:
        """The whole text, with what a decoder makes of a character that is not complete."""
        since, rest = self.ending
        return "".join(added for _, added in self.pieces(0, since)) + rest

    @property
    def ending(self) -> tuple[int, str]:
        """A number of tokens, and what the whole text has behind their complete text."""
        run = self._states[-1].run
        if run is not None and run.unfinished:
            return run.start, INCOMPLETE * run.size
        return len(self.tokens), self._states[-1].rest

    @property
    def last(self) -> tuple[int, str]:
        """A number of tokens, and what the complete text has behind theirs."""
        return self._states[-1].since, self._states[-1].added

    def is_text(self, token: int) -> bool:
        """Whether a token stands for text, as special tokens do not where they are skipped."""
        return self._learned(token)[0] is not None

    def length(self, number: int) -> int:
        """Characters of the complete text of so many tokens."""
        return self._states[number].length

    def pieces(self, begin: int, end: int) -> list[tuple[int, str]]:
        """What the complete text of ``end`` tokens has behind that of ``begin``.

        Args:
            begin: at most `final` when there were ``end`` tokens, so that nothing of it changed.
            end: at least ``begin``.

        Returns:
            Numbers of tokens, in order, and the text that came with each.
        """
        found: list[tuple[int, str]] = []
        while end > begin:
            found.append((end, self._states[end].added))
            end = self._states[end].since
        return found[::-1]

    def truncate(self, count: int) -> None:
        """Take back all but the first tokens."""
        del self.tokens[count:], self._states[count + 1 :]

    def name(self, token: int) -> str:
        """The text of a token in the next place; that of a part of a character, or its own name."""
        state, (alone, byte) = self._states[-1], self._learned(token)
        if alone is None:
            return self._decode((token,), skips=False)
        if byte is not None:
            whole = byte < 0x80 and (state.run is None or not (state.run.part or state.run.broken))
            if not whole:
                return INCOMPLETE
            return chr(byte) if state.context else alone
        before = () if state.rest or state.run else tuple(self.tokens[state.first :])
        text = _behind(state.prefix, self._decode((*state.context, *before, token)))
        return text[state.num_open :] if before else text

    def add(self, token: int) -> None:
        """Append a token."""
        state, number = self._states[-1], len(self._states)
        alone, byte = self._learned(token)
        self.tokens.append(token)
        if alone is None:
            new = state._replace(
                since=number - 1, added="",
                final=number if state.final == number - 1 else state.final,
                first=number if state.first == number - 1 else state.first,
            )  # fmt: skip
        elif byte is not None:
            new = self._with_byte(state, number, token, byte)
        else:
            new = self._with_text(state, number, token)
        self._states.append(new)

    def _with_byte(self, state: _State, number: int, token: int, byte: int) -> _State:
        alone = self._known[token][0] or ""
        run = state.run or _Run(number - 1, 0, b"", False)
        run = run._replace(size=run.size + 1, part=run.part + bytes([byte]))
        since, added = number - 1, INCOMPLETE
        if not run.broken:
            try:
                added, used = codecs.utf_8_decode(run.part, "strict", False)
                run = run._replace(part=run.part[used:])
            except UnicodeDecodeError:
                run = run._replace(broken=True)
                since, added = run.start, INCOMPLETE * run.size
        if run.broken:
            run = run._replace(part=b"")
        elif not state.context and run.size == 1 and added:
            added = alone  # a blank at the beginning of a text may be taken away
        return _State(
            since, added, self._states[since].length + len(added),
            final=number if run.broken else run.start,
            context=(token,), prefix=alone, first=number, run=run,
        )  # fmt: skip

    def _with_text(self, state: _State, number: int, token: int) -> _State:
        since, lead = number - 1, ""
        length, settled, first, shown = state.length, state.settled, state.first, state.num_open
        if state.run is not None:
            if state.run.unfinished:
                since, lead = state.run.start, INCOMPLETE * state.run.size
            length = settled = self._states[since].length + len(lead)
            first, shown = number - 1, 0
        opened = tuple(self.tokens[first:])
        text = _behind(state.prefix, self._decode((*state.context, *opened)))
        whole = len(text if self._joins_bytes else text.rstrip(INCOMPLETE))
        new = max(length, settled + whole)
        if whole == len(text) and (whole > shown or state.rest):
            return _State(
                since, lead + text[length - settled :], new, number,
                context=(token,), prefix=self._known[token][0] or "",
                first=number, settled=settled + len(text),
            )  # fmt: skip
        count, done = self._settled_apart(state, opened, text)
        new = max(new, settled + done)
        return _State(
            since, lead + text[length - settled : new - settled], new, number,
            text[new - settled :], state.context, state.prefix,
            first + count, settled + done, len(text) - done,
        )  # fmt: skip

    def _settled_apart(self, state: _State, opened: tuple[int, ...], text: str) -> tuple[int, int]:
        """How many of many open tokens have text that nothing changes, and its characters.

        The last bytes that may begin a character are those of `MAX_PART` tokens. What is before
        them is settled where it decodes by itself to what it decodes to with them.
        """
        if len(opened) % MAX_OPEN == 0:
            for count in range(len(opened) - MAX_PART, 0, -1):
                before, behind = (
                    _behind(state.prefix, self._decode((*state.context, *part)))
                    for part in (opened[:count], opened[count:])
                )
                if before + behind == text:
                    return count, len(before)
        return 0, 0

    def _learned(self, token: int) -> tuple[str | None, int | None]:
        """The text of a token by itself, None where it stands for none; its byte in a byte run."""
        if token not in self._known:
            text: str | None = self._decode((token,))
            name = self._tokenizer.convert_ids_to_tokens(token) if self._joins_bytes else ""
            if name is None or (not text and self._decode((token,), skips=False)):
                text = None
            found = BYTE.fullmatch(name) if name and name != text else None
            self._known[token] = text, None if found is None else int(found[1], 16)
        return self._known[token]

    def _decode(self, tokens: Sequence[int], *, skips: bool | None = None) -> str:
        text: str = self._tokenizer.decode(
            list(tokens),
            skip_special_tokens=self._skips if skips is None else skips,
            clean_up_tokenization_spaces=False,  # it would change what was given before
        )
        return text


def decode_behind(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of tokens behind a prompt, as `Detokenizer` has it."""
    detokenizer = Detokenizer(tokenizer, prompt)
    for token in tokens:
        detokenizer.add(token)
    return detokenizer.text


def _behind(prefix: str, text: str) -> str:
    """What a text has behind another one, whose last character it may complete."""
    if text.startswith(prefix):
        return text[len(prefix) :]
    same = (a == b for a, b in zip(prefix, text, strict=False))
    return text[sum(takewhile(bool, same)) :]


def _joins_bytes(tokenizer: Any) -> bool:
    """Whether byte tokens that follow one another are decoded all or none."""
    find = getattr(tokenizer, "convert_tokens_to_ids", None)
    ids = [] if find is None else [find("<0x41>"), find("<0xFF>")]
    if not ids or None in ids:
        return False
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text == 2 * INCOMPLETE


class StopStrings:
    """Strings that end a text, looked for while it grows (Knuth, Morris and Pratt 1977).

    Its places are values: for each string, how many of its characters the text ends with, as far as
    the string can still become complete. A string that is complete stays so.

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
        return any(place == len(one) for place, one in zip(places, self.strings, strict=True))

    def cut(self, text: str) -> int:
        """Where the first of the strings in a text begins; its length if there is none."""
        return min((n for one in self.strings if (n := text.find(one)) >= 0), default=len(text))

    def _follow(self, index: int, place: int, text: str) -> int:
        string, at = self.strings[index], 0
        while at < len(text) and place < len(string):
            if place == 0:
                at = text.find(string[0], at)
                if at < 0:
                    return 0
            if text[at] == string[place]:
                at, place = at + 1, place + 1
            else:
                place = self._border(index, place)
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
    """Whether one of the new tokens completes a stop string. A function of the tokens alone.

    Tokens that begin as those of the call before are decoded from where they differ.

    Args:
        tokenizer, prompt: as in `Detokenizer`; the text of the prompt is not looked at.
        stop: as in `StopStrings`.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenizer, self._stop = Detokenizer(tokenizer, prompt), StopStrings(stop)
        self._places = [self._stop.start]
        self._ids = np.empty(0, dtype=np.int64)

    def __call__(self, new: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> bool:
        ids = np.array(new, dtype=np.int64)
        common = min(len(ids), len(self._ids))
        unlike = np.flatnonzero(ids[:common] != self._ids[:common])
        count = int(unlike[0]) if len(unlike) else common
        self._detokenizer.truncate(count)
        del self._places[count + 1 :]
        for token in ids[count:].tolist():
            self._detokenizer.add(token)
            since, added = self._detokenizer.last
            if self._stop.is_complete(self._places[-1]):
                since = len(self._places) - 1  # ended already, whatever becomes of a byte run
            self._places.append(self._stop.follow(self._places[since], added))
        self._ids = ids
        return self._stop.is_complete(self._places[-1])
