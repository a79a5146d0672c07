"""Text between the tokens of two vocabularies.

Terms:

- window: the last tokens before a place in a text. Tokenizers treat the beginning of a text in
  their own way (some drop or add a space there), so text is decoded and encoded after a window.
- boundary: a place in a text where a token ends.
- special tokens stand for no text. One that both vocabularies have, under one name, is translated;
  another one is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how tokenizers show bytes that are no whole character
MAX_UNFINISHED = 3  # bytes of a character without its last one


class Vocabulary:
    """A tokenizer of Transformers, as far as text is carried through it.

    Args:
        tokenizer: it is not changed.
        window: how many tokens before a place are decoded and encoded with what follows.

    Attributes:
        special: id of each special token.
        first: the tokens that begin every text, such as the token for its beginning.
    """

    def __init__(self, tokenizer: Any, window: int) -> None:
        self.tokenizer = tokenizer
        self.window = window
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special: dict[str, int] = dict(
            zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        )
        self.special |= {str(token): id for id, token in added.items() if token.special}
        self._names = {id: name for name, id in self.special.items()}
        begin = tokenizer.bos_token_id
        starts = begin is not None and tokenizer("a")["input_ids"][:1] == [begin]
        self.first = [begin] if starts else []

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, as at the beginning of a text."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def added_text(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text that tokens add to those before them; neither holds special tokens."""
        window = list(before[-self.window :])
        return self.text_of([*window, *ids])[len(self.text_of(window)) :]

    def added_tokens(self, before: Sequence[int], text: str) -> list[int] | None:
        """The tokens of a text after others; None where no token ends between the two."""
        window = list(before[-self.window :])
        prefix = self.text_of(window)
        if prefix.endswith(UNFINISHED):
            return None
        ids = self.encode(prefix + text)
        # The boundary is where it was, unless the tokenizer splits the window in another way.
        ends = sorted(range(len(ids) + 1), key=lambda k: abs(k - len(window)))
        return next((ids[k:] for k in ends if self.text_of(ids[:k]) == prefix), None)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with no others around them."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def parts(self, ids: Sequence[int]) -> Iterator[tuple[list[int], str]]:
        """Runs of tokens that hold text, each with the special token after it or ""."""
        run: list[int] = []
        for id in ids:
            if id in self._names:
                yield run, self._names[id]
                run = []
            else:
                run.append(id)
        if run:
            yield run, ""


def plain_end(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """The last tokens within the window that hold text only and begin with a whole character."""
    tail = list(ids[-vocabulary.window :])
    *_, (run, name) = [([], ""), *vocabulary.parts(tail)]
    begin = 0
    while begin < len(run) and vocabulary.text_of(run[begin:]).startswith(UNFINISHED):
        begin += 1
    return [] if name else run[begin:]


class Translation:
    """The tokens of one sequence in another vocabulary, extended as the sequence grows.

    Args:
        source: the vocabulary of the sequence.
        goal: the vocabulary to carry it to.

    Attributes:
        ids: tokens of the other vocabulary; their text is that of the sequence.
        unfinished: whether the sequence ends within a character; ``ids`` then end before it.
    """

    def __init__(self, source: Vocabulary, goal: Vocabulary) -> None:
        self.source, self.goal = source, goal
        self.ids = list(goal.first)
        self.unfinished = False
        self._done = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Carry over what the sequence has gained.

        Args:
            tokens: the whole sequence, which begins with what was given before.
        """
        before = plain_end(tokens[: self._done], self.source)
        self.unfinished = False
        for run, name in self.source.parts(tokens[self._done :]):
            rest = 0 if name else self._unfinished_tokens(before, run)
            whole = run[: len(run) - rest]
            self._append(self.source.added_text(before, whole))
            self._done += len(whole) + bool(name)
            self.unfinished = rest > 0
            token = self.goal.special.get(name)
            if token is not None and self.ids != [token]:  # both begin with the same token
                self.ids.append(token)
            before = []

    def _unfinished_tokens(self, before: list[int], run: list[int]) -> int:
        """How many tokens at the end hold a part of a character only."""
        if not self.source.added_text(before, run).endswith(UNFINISHED):
            return 0
        for rest in range(1, min(len(run), MAX_UNFINISHED) + 1):
            if not self.source.added_text(before, run[:-rest]).endswith(UNFINISHED):
                return rest
        return 0  # these bytes are no part of a character

    def _append(self, text: str) -> None:
        """Add text. The last tokens are replaced where the text makes them longer."""
        end = plain_end(self.ids, self.goal)
        for back in range(len(end) + 1 if text else 0):
            kept, replaced = end[: len(end) - back], end[len(end) - back :]
            added = self.goal.added_tokens(kept, self.goal.added_text(kept, replaced) + text)
            if added is not None:
                self.ids[len(self.ids) - back :] = added
                return
