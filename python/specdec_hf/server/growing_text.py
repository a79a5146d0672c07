"""The text of a sequence as its rounds come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_hf.loop.streaming import Step

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character is decoded to
MIN_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class TokenLogprob:
    """A token of an answer.

    Attributes:
        token: its text.
        logprob: its log probability under the model.
        top: the likeliest tokens in its place, with theirs.
        begin, end: where its text is in that of the answer, in characters.
    """

    token: str
    logprob: float
    top: list[tuple[str, float]]
    begin: int
    end: int


@dataclass
class Piece:
    """What a step appends to a text; ``finished`` is why the text ended, "" while it goes on."""

    text: str
    step: Step
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: str = ""


class GrowingText:
    """Makes pieces of text of the steps of a sequence.

    A character whose bytes are not complete waits for the rest of them, and what may begin a stop
    string waits until it does not. Log probabilities come with the text of their tokens.

    Args:
        tokenizer: decodes the tokens; special tokens are left out.
        prompt: token ids, not empty.
        stop: strings before which the text ends.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.text, self.finished = "", ""
        self.tokens: list[int] = []
        self._tokenizer, self._last, self._stop = tokenizer, prompt[-1], stop
        self._waiting: list[TokenLogprob] = []
        self._end = 0  # of the text of `tokens`, where log probabilities are asked for

    def add(self, step: Step) -> Piece:
        """The piece of a step; steps behind the end of the text have none."""
        self._note(step)
        self.tokens += step.tokens
        text = self._decode(self.tokens)
        begins = [text.index(string) for string in self._stop if string in text]
        self.finished = "stop" if begins else step.finished
        if begins:
            text = text[: min(begins)]
        sure = len(text)
        if not self.finished:
            sure = 0 if text.endswith(INCOMPLETE) else sure - self._begun(text)
        piece = Piece(text[len(self.text) : max(sure, len(self.text))], step)
        self.text += piece.text
        piece.finished = self.finished
        piece.logprobs = self._release(cut=bool(begins))
        return piece

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text may begin a stop string."""
        return max(
            (
                n
                for string in self._stop
                for n in range(1, min(len(string) - 1, len(text)) + 1)
                if text.endswith(string[:n])
            ),
            default=0,
        )

    def _decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            tokens,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,  # it would change what was given before
        )
        return text

    def _note(self, step: Step) -> None:
        """Let the log probabilities of a step wait for the text of their tokens."""
        for n, found in enumerate(step.top_logprobs):
            text = self._decode(self.tokens + step.tokens[: n + 1])
            before = step.tokens[n - 1] if n else (self.tokens or [self._last])[-1]
            (chosen, *_) = found.values()
            named = [
                (self._name(before, token), max(value, MIN_LOGPROB))
                for token, value in sorted(found.items(), key=lambda item: -item[1])
            ]
            name = self._name(before, step.tokens[n])
            begin, self._end = self._end, max(self._end, len(text.rstrip(INCOMPLETE)))
            if name and text.endswith(name):  # what was incomplete before it remains so
                begin = len(text) - len(name)
            # A part of a character comes with the whole of it.
            end = begin + 1 if text.endswith(INCOMPLETE) else self._end
            value = max(chosen, MIN_LOGPROB)
            self._waiting.append(TokenLogprob(name, value, named, begin, max(end, self._end)))

    def _name(self, before: int, token: int) -> str:
        """The text of a token behind another; alone, it may lack the blank at its beginning."""
        first, both, alone = (
            self._decode(ids, skip_special_tokens=False)
            for ids in ([before], [before, token], [token])
        )
        if both.startswith(first) and not first.endswith(INCOMPLETE):
            return both[len(first) :]
        return alone

    def _release(self, *, cut: bool) -> list[TokenLogprob]:
        """Those whose text was given; at an end that no stop string made, all."""
        length = len(self.text)
        if cut:
            released = [one for one in self._waiting if one.begin < length]
        elif self.finished:
            released = self._waiting
        else:
            released = [one for one in self._waiting if one.end <= length]
        self._waiting = self._waiting[len(released) :]
        return released
