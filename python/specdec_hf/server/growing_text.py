"""The text of a sequence as its rounds come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_hf.detokenizer import INCOMPLETE, Detokenizer, StopStrings
from specdec_hf.loop.streaming import Step

MIN_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class TokenLogprob:
    """A token of an answer.

    Attributes:
        token: its text.
        logprob: its log probability under the model.
        top: the likeliest tokens in its place, with theirs.
        number: how many tokens the answer has with it.
        is_text: whether it is no special token, which has a name and no text.
        begin, end: where its text is in that of the answer, in characters.
    """

    token: str
    logprob: float
    top: list[tuple[str, float]]
    number: int
    is_text: bool
    begin: int = 0
    end: int = 0


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
        prompt: token ids; the text is what follows theirs.
        stop: strings before which the text is cut where a step has ended it with one of them, as
            `StopCriterion` does; which step that is, nothing here decides.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.finished = ""
        self._detokenizer, self._stop = Detokenizer(tokenizer, prompt), StopStrings(stop)
        self._places = self._stop.start
        self._sent: list[str] = []
        self._length, self._number = 0, 0  # of what was sent, and tokens of what cannot change
        self._held = ""  # what cannot change and was not sent
        self._waiting: deque[TokenLogprob] = deque()

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(self._sent)

    def add(self, step: Step) -> Piece:
        """The piece of a step."""
        for n, token in enumerate(step.tokens):
            if step.top_logprobs:
                self._note(token, step.top_logprobs[n])
            self._detokenizer.add(token)
            if step.top_logprobs:
                self._place()
        self.finished = step.finished
        cut = self.finished == "stop" and bool(self._stop.strings)
        final, rest = self._detokenizer.final, ""
        if self.finished:
            final, rest = self._detokenizer.ending
            if cut:  # with the token that made a stop string complete
                final, rest = len(self._detokenizer.tokens), ""
            self._place_bytes(final, len(self._detokenizer.tokens) + 1)
        new = "".join(text for _, text in self._detokenizer.pieces(self._number, final)) + rest
        self._number = final
        self._places = self._stop.follow(self._places, new)
        self._held += new
        size = len(self._held)
        if cut:
            size = self._stop.cut(self._held)
        elif not self.finished:
            size -= max(self._places, default=0)
        piece = Piece(self._held[:size], step, finished=self.finished)
        self._held = self._held[size:]
        self._sent.append(piece.text)
        self._length += size
        piece.logprobs = self._release(cut=cut)
        return piece

    def _note(self, token: int, found: dict[int, float]) -> None:
        """Let the log probabilities of the next token wait for its text."""
        name = self._detokenizer.name
        (chosen, *_) = found.values()
        named = [
            (name(other), max(value, MIN_LOGPROB))
            for other, value in sorted(found.items(), key=lambda item: -item[1])
        ]
        number, rest = self._detokenizer.ending
        count = len(self._detokenizer.tokens)
        # Where the character begins that is not complete, if there is one.
        begin = self._detokenizer.length(count) + max(len(rest) - 1, 0) * (number == count)
        is_text = self._detokenizer.is_text(token)
        value = max(chosen, MIN_LOGPROB)
        self._waiting.append(TokenLogprob(name(token), value, named, count + 1, is_text, begin))

    def _place(self) -> None:
        """Say where the text of the last token is; a part of a character is the whole of it."""
        detokenizer, one = self._detokenizer, self._waiting[-1]
        since, added = detokenizer.last
        self._place_bytes(since, one.number)
        before, now = detokenizer.length(one.number - 1), detokenizer.length(one.number)
        number, rest = detokenizer.ending
        in_run = number < one.number
        if not one.is_text:
            one.begin = one.end = now
            return
        rest = "" if in_run else rest
        if (added + rest).endswith(one.token):
            one.begin = now + len(rest) - len(one.token)
        else:
            one.begin = max(before, min(one.begin, now - 1))
        one.end = one.begin + 1 if in_run else now + len(rest)

    def _place_bytes(self, since: int, number: int) -> None:
        """Say where bytes are that turned out to be no text: each is a character of its own."""
        if since == number - 1:
            return
        place = self._detokenizer.length(since)
        for one in self._waiting:
            if since < one.number < number:
                one.token = INCOMPLETE if one.is_text else one.token
                one.begin, place = place, place + one.is_text
                one.end = place

    def _release(self, *, cut: bool) -> list[TokenLogprob]:
        """Those whose text was given; at an end that no stop string made, all."""
        waiting, released = self._waiting, list[TokenLogprob]()
        everything = bool(self.finished) and not cut
        while waiting:
            # What has no text waits for that behind it, since the text may be cut before both.
            end = waiting[0].begin + 1 if cut else max(waiting[0].begin + 1, waiting[0].end)
            if end > self._length and not everything:
                break
            released.append(waiting.popleft())
        return released
