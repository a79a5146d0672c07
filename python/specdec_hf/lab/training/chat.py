"""The tokens that surround a user's turn and its answer in a model's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TURN = "\N{INVERTED QUESTION MARK}TURN\N{INVERTED QUESTION MARK}"  # no template changes it


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation of one user's turn and one answer is written in tokens.

    Attributes:
        before: tokens up to the first one of the user's turn.
        between: tokens from the end of that turn to the first one of the answer.
        ends: tokens that end a turn.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> ChatFormat:
        """The format of a model's chat template; without one a conversation is one text.

        Raises:
            ValueError: a template that changes the user's words, or a tokenizer that has neither a
                template nor a token to begin with.
        """
        given = model.generation_config.eos_token_id
        ends = set(given) if isinstance(given, list) else {given}
        ends = (ends | {tokenizer.eos_token_id}) - {None}
        if not tokenizer.chat_template:
            first = tokenizer.bos_token_id
            first = tokenizer.eos_token_id if first is None else first
            if first is None:
                raise ValueError(
                    "the tokenizer must have a chat template, or a token to begin with"
                )
            return cls((first,), (), frozenset(ends))
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _TURN}], tokenize=False, add_generation_prompt=True
        )
        before, turn, between = text.partition(_TURN)
        if not turn:
            raise ValueError("the chat template must write the user's words as they are")
        encoded = [
            tuple(tokenizer(part, add_special_tokens=False)["input_ids"])
            for part in (before, between)
        ]
        if not encoded[0] or not encoded[1]:
            raise ValueError(
                "the chat template must write tokens before and after the user's words"
            )
        return cls(encoded[0], encoded[1], frozenset(ends | {encoded[1][0]}))
