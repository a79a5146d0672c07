"""The prompts of requests as token ids: one text at a time, the shortest of those that wait."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from specdec_hf.arguments import shown
from tokenizers import models, pre_tokenizers

from specdec_serve.faults import Fault
from specdec_serve.fields import PROMPTS, Message, Tool, is_ids

NFC_JOINS = 4  # characters at most, which become one


@dataclass(frozen=True)
class Continuation:
    """A text that follows a prompt, so that no token of a beginning is put before it."""

    text: str


@dataclass(frozen=True)
class Chat:
    """The messages of a chat, and the tools that its answer may call."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()


Text = str | Continuation | Chat
Prompt = Text | list[int]


class Encoder:
    """Encodes texts in a thread, since a text of a megabyte takes a second.

    A tokenizer may not serve two threads. So a text waits for the one that is encoded, and then for
    shorter ones; a client with many long texts does not delay others by more than one of them.

    Args:
        tokenizer: of the model. Chats need its chat template.
        context: the model's, in tokens; None where it has none.
    """

    def __init__(self, tokenizer: Any, context: int | None) -> None:
        self._tokenizer, self._context = tokenizer, context or 0
        self._waiting: asyncio.PriorityQueue[Any] = asyncio.PriorityQueue()
        self._numbers = itertools.count()
        self._capacity = None if context is None else token_capacity(tokenizer)
        self._max_characters = math.inf  # that may fit into the context, but for lost ones
        if self._capacity is not None:
            self._max_characters = self._context * self._capacity.characters

    async def encode(self, field: str, prompt: Prompt) -> list[int]:
        """The token ids of a text, of a conversation, or those that were given.

        A text whose caller is cancelled while it waits is never encoded.
        """
        if not _is_text(prompt):
            if not is_ids(prompt):
                raise Fault(400, f"{field} {PROMPTS}, got {shown(prompt)}", param=field)
            return prompt
        encoded = asyncio.get_running_loop().create_future()
        turn = _characters(prompt), next(self._numbers)
        self._waiting.put_nowait((*turn, field, prompt, encoded))
        ids: list[int] = await encoded
        return ids

    async def run(self) -> None:
        """Encode what waits, until the task of this is cancelled."""
        while True:
            *_, field, prompt, encoded = await self._waiting.get()
            if encoded.done():
                continue
            ids, fault = None, None
            try:
                ids = await asyncio.to_thread(self._ids, field, prompt)
            except Fault as error:
                fault = error
            if encoded.done():
                continue
            if fault is None:
                encoded.set_result(ids)
            else:
                encoded.set_exception(fault)

    def end_all(self, fault: Fault) -> None:
        """Let all that wait have a fault."""
        while not self._waiting.empty():
            *_, encoded = self._waiting.get_nowait()
            if not encoded.done():
                encoded.set_exception(fault)

    def _ids(self, field: str, prompt: Text) -> list[int]:
        try:
            if isinstance(prompt, str):
                self._check_length(field, prompt)
                return list(self._tokenizer(prompt)["input_ids"])
            if isinstance(prompt, Continuation):
                self._check_length(field, prompt.text, beside=0)
                return list(self._tokenizer(prompt.text, add_special_tokens=False)["input_ids"])
            self._check_template(field, prompt)
            template = partial(
                self._tokenizer.apply_chat_template,
                [message.turn() for message in prompt.messages],
                tools=[tool.model_dump(exclude_unset=True) for tool in prompt.tools] or None,
                add_generation_prompt=True,
            )
            if _characters(prompt) > self._max_characters:
                # The template may have left out most of it.
                self._check_length(field, template(tokenize=False))
            return list(template(return_dict=False))
        except Fault:
            raise
        except Exception as error:  # whatever a tokenizer or a chat template raises
            raise Fault(400, f"{field} cannot be encoded: {error}", param=field) from error

    def _check_length(self, field: str, text: str, beside: int = 1) -> None:
        """Refuse a text that no tokens can hold within the context, before it is encoded.

        The context must hold as many other tokens ``beside`` it.
        """
        if self._capacity is None or len(text) <= self._max_characters:
            return
        if (tokens := self._capacity.min_tokens(text)) > self._context - beside:
            less = "one less than the model's context" if beside else "the model's context"
            rule = f"at most {self._context - beside} tokens, {less}"
            line = f"{field} must have {rule}, got {len(text)} characters, {tokens} tokens or more"
            raise Fault(400, line, param=field, code="context_length_exceeded")

    def _check_template(self, field: str, chat: Chat) -> None:
        """Refuse what the chat template would leave out, or write as any role."""

        def check(word: str, place: str, line: str) -> None:
            if not re.search(word, self._tokenizer.get_chat_template(tools=tools)):
                raise Fault(400, f"{place} {line}", param=place)

        tools = [tool.model_dump() for tool in chat.tools] or None
        if tools:
            line = "must not be given, since the chat template of the model has none"
            check(r"\btools\b", "tools", line)
        for n, message in enumerate(chat.messages):
            if message.role == "tool":
                line = "must be a role that the chat template of the model names, got 'tool'"
                check(r"""["']tool["']""", f"{field}.{n}.role", line)
            if message.tool_calls:
                line = "must not be given, since the chat template of the model reads none"
                check(r"\btool_calls\b", f"{field}.{n}.tool_calls", line)


def _is_text(prompt: Prompt) -> TypeGuard[Text]:
    return isinstance(prompt, str | Continuation | Chat)


def _characters(prompt: Text) -> int:
    if isinstance(prompt, str | Continuation):
        return len(prompt if isinstance(prompt, str) else prompt.text)
    written = [json.dumps(tool.model_dump()) for tool in prompt.tools]
    for message in prompt.messages:
        written.append(message.content or "")
        written += [
            call.function.name + call.function.arguments for call in message.tool_calls or ()
        ]
    return sum(map(len, written)) + len(prompt.messages)


class Capacity(NamedTuple):
    """How many ``characters`` of a text a token holds at most, but for ``lost`` ones."""

    characters: int
    lost: str

    def min_tokens(self, text: str) -> int:
        """Fewer tokens than these cannot hold a text."""
        held = len(text) - sum(map(text.count, self.lost))
        return -(-held // self.characters)


def token_capacity(tokenizer: Any) -> Capacity | None:
    """That of the tokens of byte-level BPE; None for others, which may drop or join characters."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(getattr(backend, "model", None), models.BPE):
        return None
    normalizer, splits = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    kinds = {step["type"] for step in splits}
    if {step["type"] for step in normalizer} - {"NFC"}:
        return None
    if "ByteLevel" not in kinds or kinds - {"ByteLevel", "Digits", "Split"}:
        return None
    if any(step.get("behavior") == "Removed" for step in splits):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return None
    vocabulary = tokenizer.get_vocab()
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    last_bytes = {chr(code): split(chr(code))[0][0][-1] for code in range(0xC0)}
    lost = "".join(one for one, byte in last_bytes.items() if byte not in vocabulary)
    if not lost.isascii():  # the last byte of a longer character
        return None
    return Capacity(max(map(len, vocabulary)) * (NFC_JOINS if normalizer else 1), lost)


def _steps(component: Any) -> list[dict[str, Any]]:
    """A normalizer or a pre-tokenizer as the steps that it is made of."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    steps: list[dict[str, Any]] = state.get("normalizers") or state.get("pretokenizers") or [state]
    return steps
