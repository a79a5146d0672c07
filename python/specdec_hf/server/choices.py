"""Choices of OpenAI's API: of completions and of chats, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_hf.detokenizer import INCOMPLETE
from specdec_hf.server.faults import Fault
from specdec_hf.server.growing_text import Piece, TokenLogprob

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
        part = self._part(index, piece.text)
        return self._choice(index, part, self._listed(piece), piece.finished)

    def _listed(self, piece: Piece) -> list[TokenLogprob]:
        """The tokens of a piece that are listed."""
        return piece.logprobs

    def _choice(
        self, index: int, text: dict[str, Any], listed: Sequence[TokenLogprob], finished: str
    ) -> dict[str, Any]:
        if finished == "cancelled":
            raise Fault(503, "the server ends")
        return {
            "index": index, **text,
            "logprobs": None if self.num_top_logprobs is None else self._logprobs(listed),
            "finish_reason": FINISH_REASONS[finished][0] if finished else None,
        }  # fmt: skip

    def _whole(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, listed: Sequence[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError


class CompletionForm(Form):
    """Of /v1/completions. Offsets count the characters of the answer."""

    kind, prefix = "text_completion", "cmpl-"

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _part(self, index: int, text: str) -> dict[str, Any]:
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

    def _part(self, index: int, text: str) -> dict[str, Any]:
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


def _named(token: str, logprob: float) -> dict[str, Any]:
    # The bytes of a part of a character are not known.
    found = None if INCOMPLETE in token else list(token.encode())
    return {"token": token, "logprob": logprob, "bytes": found}
