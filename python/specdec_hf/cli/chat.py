"""The command ``chat``: a conversation whose answers are printed as they come.

The cache of an answer serves the next one where the new conversation begins with exactly the tokens
that the cache holds. Templates that rewrite earlier answers, such as those that drop their
reasoning, make the model read the conversation again.
"""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

import functools
import sys
import time
from typing import TYPE_CHECKING, Any

from specdec_hf.cli import interrupt
from specdec_hf.cli.advice import compile_hint, print_advice
from specdec_hf.cli.checks import Settings, Sources
from specdec_hf.cli.messages import read_messages, refused
from specdec_hf.cli.run import (
    begin_chat,
    encode,
    generation_arguments,
    load_models,
    make_decoder,
    progress_bar,
)
from specdec_hf.cli.terminal import FAILED, console, errors, fail, visible

if TYPE_CHECKING:
    from specdec_hf.cli.compare import Turn
    from specdec_hf.cli.load import Loaded
    from specdec_hf.decode.generate import SpeculativeDecoder
    from specdec_hf.decode.streaming import Step

HELP = "/reset forgets the conversation, Ctrl-C stops an answer, and /exit or Ctrl-D ends the chat."


class Conversation:
    """Messages so far, and the cache of the last answer."""

    def __init__(self, loaded: Loaded, decoder: SpeculativeDecoder, settings: Settings) -> None:
        self.loaded = loaded
        self.decoder = decoder
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = begin_chat(self.settings)
        self.past: Any = None
        self.cached: list[int] = []

    def answer(self, text: str) -> Turn:
        """Answer a message, and print the answer as it comes.

        Raises:
            ValueError: the conversation is longer than the model's context; it is as before then.
            KeyboardInterrupt: Ctrl-C; the conversation goes on from the begun answer.
        """
        from specdec_hf.cli.compare import Turn
        from specdec_hf.cli.trace import PieceStream, marks_of, styled
        from specdec_hf.cli.word_wrap import WordWrap
        from specdec_hf.decode.streaming import run_stream

        messages = [*self.messages, {"role": "user", "content": text}]
        inputs = encode(self.loaded.tokenizer, messages, self.loaded.model.device)
        ids = inputs["input_ids"][0].tolist()
        past = self.past if 0 < len(self.cached) < len(ids) else None
        if ids[: len(self.cached)] != self.cached:
            past = None
        began = time.perf_counter()
        stream = self.decoder.stream(
            self.loaded.model,
            **inputs,
            **generation_arguments(self.settings),
            past_key_values=past,
            return_dict_in_generate=True,
        )
        marks, pieces = marks_of(console), PieceStream(self.loaded.tokenizer)
        wrap = WordWrap(console.width if console.is_terminal else None)

        def show(step: Step) -> None:
            for piece, kind in pieces.feed(step):
                console.print(wrap.feed(styled(piece, kind, marks)), end="", soft_wrap=True)

        try:
            steps, output = run_stream(stream, show)
        except BaseException as error:
            if interrupt.is_interruption(error):
                stream.close()
                console.print(wrap.rest(), soft_wrap=True)
                self.past, self.cached = None, []  # the stream has changed the cache
                self.messages = [*messages, self._said(pieces.tokens)]
            raise
        console.print(wrap.feed(styled(*pieces.rest(), marks)), end="", soft_wrap=True)
        console.print(wrap.rest(), soft_wrap=True)
        turn = Turn(len(ids), steps, output.stats, time.perf_counter() - began)
        if self.settings.do_sample:
            turn.seed = output.stats.seeds[0]
        sequence = output.sequences[0].tolist()
        self.past, self.cached = output.past_key_values, sequence[:-1]
        self.messages = [*messages, self._said(turn.tokens)]
        return turn

    def _said(self, tokens: list[int]) -> dict[str, str]:
        text = self.loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        return {"role": "assistant", "content": text}


def chat(settings: Settings, sources: Sources) -> None:
    """Read messages from standard input until it ends, and answer each of them."""
    interactive = sys.stdin is not None and sys.stdin.isatty()
    with progress_bar() as say:
        check_template = functools.partial(_check_template, sources.model.title)
        loaded = load_models(settings, sources, say, check_template)
    conversation = Conversation(loaded, make_decoder(settings, loaded.drafter), settings)
    _greet(loaded, interactive)
    try:
        answered = _talk(conversation, interactive)
    except KeyboardInterrupt:
        console.print()  # ends the line that the prompt or the answer began
        raise
    if not answered:
        fail("the last message was not answered", FAILED)


def _check_template(title: str, tokenizer: Any, config: Any) -> None:
    if tokenizer.chat_template is None:
        fail(f"chat needs a chat template, which the tokenizer of {title} lacks")


def _talk(conversation: Conversation, interactive: bool) -> bool:
    """Answer all messages; False where the last one was too long or refused."""
    answered = True
    turns: list[Turn] = []
    for text in read_messages(interactive):
        if text == "/reset":
            conversation.reset()
        elif text == "/help":
            console.print(HELP, style="dim")
        else:
            answered = not refused(text) and _respond(conversation, text, interactive, turns)
    print_advice(compile_hint(turns, conversation.loaded.model))
    return answered


def _respond(conversation: Conversation, text: str, interactive: bool, turns: list[Turn]) -> bool:
    """Answer a message, and add the answer to ``turns``; False where it was too long."""
    from specdec_hf.cli.report import figures, print_notes

    try:
        turn = conversation.answer(text)
    except BaseException as error:
        if interactive and interrupt.is_interruption(error):
            console.print("the answer was stopped; Ctrl-C again leaves", style="dim")
            interrupt.forget()
            return True
        if not isinstance(error, ValueError):
            raise
        errors.print(visible(f"error: {error}"))  # the next message, or /reset, may still fit
        return False
    turns.append(turn)
    console.print(figures(turn), style="dim")
    print_notes(turn)
    return True


def _greet(loaded: Loaded, interactive: bool) -> None:
    from specdec_hf.cli.trace import legend, marks_of

    title = f"{loaded.title}, {loaded.dtype}, {loaded.model.device}"
    console.print(visible(f"{title}. {HELP}" if interactive else title), style="dim")
    console.print(legend(marks_of(console)))
