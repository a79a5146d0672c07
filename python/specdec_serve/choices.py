"""How routes write texts, whole and in pieces: OpenAI's, and that of text-generation-inference."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Any

from specdec_hf.detokenizer import INCOMPLETE

from specdec_serve.faults import Fault
from specdec_serve.fields import GenerateRequest, ToolChoice
from specdec_serve.growing_text import Piece, TokenLogprob
from specdec_serve.tool_calls import GrowingCall

# Why a text ended, in the words of OpenAI and of text-generation-inference.
FINISH_REASONS = {
    "eos": ("stop", "eos_token"),
    "criteria": ("stop", "stop_sequence"),
    "length": ("length", "length"),
    "context": ("length", "length"),
}


class Form:
    """How a route writes texts.

    Args:
        num_top_logprobs: how many of the likeliest tokens are listed; None lists no token.
        streams: whether a text comes in chunks.
    """

    kind, prefix = "", ""

    def __init__(self, num_top_logprobs: int | None, streams: bool) -> None:
        self.num_top_logprobs, self.streams = num_top_logprobs, streams

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole text."""
        text = "".join(piece.text for piece in pieces)
        listed = [one for piece in pieces for one in self._listed(piece)]
        return self._choice(index, self._whole(text), listed, pieces[-1].finished)

    def chunk(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """What a piece appends to a text; None where it has to wait for more."""
        if not (piece.text or piece.logprobs or piece.finished):
            return None
        part = self._part(index, piece.text, is_last=bool(piece.finished))
        return self._choice(index, part, self._listed(piece), piece.finished)

    def _listed(self, piece: Piece) -> list[TokenLogprob]:
        """The tokens of a piece that are listed."""
        return piece.logprobs

    def _choice(
        self, index: int, text: dict[str, Any], listed: Sequence[TokenLogprob], finished: str
    ) -> dict[str, Any]:
        _check_whole(finished)
        return {
            "index": index, **text,
            "logprobs": None if self.num_top_logprobs is None else self._logprobs(listed),
            "finish_reason": FINISH_REASONS[finished][0] if finished else None,
        }  # fmt: skip

    def _whole(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, index: int, text: str, *, is_last: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, listed: Sequence[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError


class CompletionForm(Form):
    """Of /v1/completions. Offsets count the characters of the answer."""

    kind, prefix = "text_completion", "cmpl-"

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _part(self, index: int, text: str, *, is_last: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, listed: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [one.token for one in listed],
            "token_logprobs": [one.logprob for one in listed],
            # Of tokens with the same text the likeliest stays.
            "top_logprobs": [dict(reversed(one.top)) for one in listed],
            "text_offset": [one.begin for one in listed],
        }


class ChatForm(Form):
    """Of /v1/chat/completions. The role comes with the first chunk of a choice."""

    prefix = "chatcmpl-"

    def __init__(self, num_top_logprobs: int | None, streams: bool) -> None:
        super().__init__(num_top_logprobs, streams)
        self.kind = "chat.completion.chunk" if streams else "chat.completion"
        self._begun: set[int] = set()

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _part(self, index: int, text: str, *, is_last: bool) -> dict[str, Any]:
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        return {"delta": {**role, "content": text}}

    def _listed(self, piece: Piece) -> list[TokenLogprob]:
        """Without the token that ends a chat where it has no text, as in OpenAI's answers."""
        listed = piece.logprobs
        ends = bool(listed) and piece.finished == "eos" and listed[-1].begin == listed[-1].end
        return listed[:-1] if ends else listed

    def _logprobs(self, listed: Sequence[TokenLogprob]) -> dict[str, Any]:
        count = self.num_top_logprobs or 0
        content = [
            {
                **_named(one.token, one.logprob),
                "top_logprobs": [_named(*pair) for pair in one.top[:count]],
            }
            for one in listed
        ]
        return {"content": content, "refusal": None}


class ToolForm(ChatForm):
    """Writes the answer of a chat that calls a function.

    Args:
        choice: which one.
    """

    def __init__(self, num_top_logprobs: int | None, streams: bool, choice: ToolChoice) -> None:
        super().__init__(num_top_logprobs, streams)
        self._tool_choice = choice
        self._calls: dict[int, GrowingCall] = {}
        self._named: set[int] = set()  # calls whose name was sent

    def _whole(self, text: str) -> dict[str, Any]:
        call = GrowingCall(self._tool_choice.name)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        function = {"arguments": call.add(text, is_last=True), "name": call.name}
        if call.name:  # else the text was cut before it
            made = {"id": _call_id(), "type": "function", "function": function}
            message["tool_calls"] = [made]
        return {"message": message}

    def _part(self, index: int, text: str, *, is_last: bool) -> dict[str, Any]:
        call = self._calls.setdefault(index, GrowingCall(self._tool_choice.name))
        delta = super()._part(index, "", is_last=is_last)["delta"] | {"content": None}
        function = {"arguments": call.add(text, is_last=is_last)}
        if call.name and index not in self._named:
            self._named.add(index)
            begun = {"id": _call_id(), "type": "function"}
            function["name"] = call.name
            delta["tool_calls"] = [{"index": 0, **begun, "function": function}]
        elif function["arguments"]:
            delta["tool_calls"] = [{"index": 0, "function": function}]
        return {"delta": delta}

    def _choice(
        self, index: int, text: dict[str, Any], listed: Sequence[TokenLogprob], finished: str
    ) -> dict[str, Any]:
        made = super()._choice(index, text, listed, finished)
        # OpenAI's API says "stop" where the function was named.
        if made["finish_reason"] == "stop" and self._tool_choice.kind == "required":
            made["finish_reason"] = "tool_calls"
        return made


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class GenerateForm:
    """Of text-generation-inference: an event is a token.

    Args:
        asked: the request.
        seed: of the text; None where it is greedy.
        input_length: tokens of the prompt.
        special: ids of the special tokens, whose text is left out.
    """

    def __init__(
        self, asked: GenerateRequest, seed: int | None, input_length: int, special: Collection[int]
    ) -> None:
        self.asked, self.seed, self.input_length = asked, seed, input_length
        self._special = special
        self._text, self._ids = "", list[int]()
        self._sent, self._count = 0, 0  # characters and tokens of events

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        """The tokens whose text a piece has; the last of all comes with the whole text."""
        events: list[dict[str, Any]] = []
        for token in self.tokens(piece):
            event = {"index": self._count - len(piece.logprobs) + len(events) + 1, "token": token}
            events.append({**event, "generated_text": None, "details": None})
        if piece.finished:
            details = {**self._details(piece), "input_length": self.input_length}
            events[-1] |= {
                "generated_text": self._whole(),
                "details": details if self.asked.parameters.details else None,
            }
        return events

    def answer(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole text."""
        tokens = [token for piece in pieces for token in self.tokens(piece)]
        answer: dict[str, Any] = {"generated_text": self._whole()}
        if self.asked.parameters.details:
            answer["details"] = {**self._details(pieces[-1]), "prefill": [], "tokens": tokens}
        return answer

    def tokens(self, piece: Piece) -> list[dict[str, Any]]:
        """Those whose text a piece has."""
        _check_whole(piece.finished)
        self._text += piece.text
        self._ids += piece.step.tokens
        tokens = []
        for one in piece.logprobs:
            number, self._count = self._ids[self._count], self._count + 1
            is_last = bool(piece.finished) and self._count == len(self._ids)
            end = len(self._text) if is_last else max(self._sent, one.end)
            token = {"id": number, "text": self._text[self._sent : end], "logprob": one.logprob}
            tokens.append({**token, "special": number in self._special})
            self._sent = end
        return tokens

    def _whole(self) -> str:
        return self.asked.inputs * self.asked.parameters.return_full_text + self._text

    def _details(self, last: Piece) -> dict[str, Any]:
        reason = FINISH_REASONS[last.finished][1]
        return {"finish_reason": reason, "generated_tokens": len(self._ids), "seed": self.seed}


def _check_whole(finished: str) -> None:
    """Refuse a text that ended with the server."""
    if finished == "cancelled":
        raise Fault(503, "the server ends")


def _named(token: str, logprob: float) -> dict[str, Any]:
    # The bytes of a part of a character are not known.
    found = None if INCOMPLETE in token else list(token.encode())
    return {"token": token, "logprob": logprob, "bytes": found}
