"""The text of a sequence as its rounds come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_hf.detokenizer import Detokenizer, StopStrings
from specdec_hf.loop.streaming import Step

MIN_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class TokenLogprob:
    """A token of an answer.

    Attributes:
        token: its text.
        logprob: its log probability under the model.
        top: the likeliest tokens in its place, with theirs.
        begin, end: where its text is in that of the answer, in characters; a part of a character is
            where the whole of it is.
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
        prompt: token ids; the text is what follows theirs.
        stop: where the text has one of these strings when its last step comes, it is cut before it.
            `StopCriterion` decides which step is the last.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.text, self.finished = "", ""
        self._detokenizer, self._stop = Detokenizer(tokenizer, prompt), StopStrings(stop)
        self._places = self._stop.start
        self._held = ""  # what may begin a stop string
        self._waiting: deque[TokenLogprob] = deque()

    def add(self, step: Step) -> Piece:
        """The piece of a step."""
        for n, token in enumerate(step.tokens):
            top = step.top_logprobs[n] if step.top_logprobs else {}
            names = {one: self._detokenizer.name(one) for one in top}
            begin = len(self.text) + len(self._held)
            new = self._detokenizer.add(token)
            self._held += new
            self._places = self._stop.follow(self._places, new)
            if top:
                self._note(token, top, names, begin, new)
        self.finished = step.finished
        cut = bool(self.finished) and self._stop.is_complete(self._places)
        size = len(self._held)
        if cut:
            size = self._stop.cut(self._held)
        elif self.finished:
            self._place_rest(rest := self._detokenizer.rest())
            self._held += rest
            size = len(self._held)
        else:
            size -= max(self._places, default=0)
        piece = Piece(self._held[:size], step, finished=self.finished)
        self.text += piece.text
        self._held = self._held[size:]
        piece.logprobs = self._release(cut=cut)
        return piece

    def _note(
        self, token: int, top: dict[int, float], names: dict[int, str], begin: int, new: str
    ) -> None:
        """Let the log probabilities of a token, whose piece is ``new``, wait for its text."""
        named = [
            (names[other], max(value, MIN_LOGPROB))
            for other, value in sorted(top.items(), key=lambda item: -item[1])
        ]
        name, end = names[token], begin + len(new)
        num_open = self._detokenizer.num_open
        if new and num_open:  # the piece is that of earlier tokens
            for one in reversed(self._waiting):
                if num_open > 1:
                    num_open -= one.end > one.begin
                    one.begin, one.end = end, end + (one.end > one.begin)
                elif one.end > begin:
                    one.end = end
            begin, end = end, end + 1
        elif new.endswith(name) and len(name) < len(new):
            for one in self._waiting:  # open tokens, whose bytes turned out to be no character
                one.end = end - len(name) if one.end > begin else one.end
            begin = end - len(name)
        elif not new and not self._detokenizer.is_special(token):
            end += 1  # the rest of its character is still to come
        self._waiting.append(TokenLogprob(name, max(top[token], MIN_LOGPROB), named, begin, end))

    def _place_rest(self, rest: str) -> None:
        """Say where the text of open tokens is, which are no character, and what follows them."""
        begin = len(self.text) + len(self._held)
        end, is_behind = begin + len(rest), bool(rest)
        for one in reversed(self._waiting):
            if one.end > begin:
                one.end, is_behind = end, False
            elif is_behind:
                one.begin = one.end = end

    def _release(self, *, cut: bool) -> list[TokenLogprob]:
        """Those whose text was given; at an end that no stop string made, all."""
        released, everything = list[TokenLogprob](), bool(self.finished) and not cut
        while self._waiting:
            # What has no text waits for that behind it, since the text may be cut before both.
            one = self._waiting[0]
            end = one.begin + 1 if cut else max(one.begin + 1, one.end)
            if end > len(self.text) and not everything:
                break
            released.append(self._waiting.popleft())
        return released
