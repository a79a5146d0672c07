"""The command ``chat``: a conversation whose answers are printed as they come.

The cache of an answer serves the next one where the new conversation begins with exactly the tokens
that the cache holds. Templates that rewrite earlier answers, such as those that drop their
reasoning, make the model read the conversation again.
"""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

import functools
import re
import select
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.text import Text

from specdec_hf.cli import interrupt
from specdec_hf.cli.checks import Settings, Sources, check_text
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
    from specdec_hf.api import SpeculativeDecoder
    from specdec_hf.cli.compare import Turn
    from specdec_hf.cli.load import Loaded
    from specdec_hf.loop.streaming import Step

HELP = "/reset forgets the conversation, Ctrl-C stops an answer, and /exit or Ctrl-D ends the chat."
PROMPT = "> "
COMMANDS = ("/help", "/reset", "/exit")
# A path such as /etc/hosts at the beginning of a message is none.
_COMMAND = re.compile(r"/\w*(?!\S)")
PASTE_SECONDS = 0.05  # within which the lines of a paste follow one another
TAB = 8
# Chinese and Japanese have no blanks between words: a line may end after each of their characters.
_PARTS = re.compile(r"\n|[^\S\n]+|[⺀-￿]|[^\s⺀-￿]+")


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
        from specdec_hf.loop.streaming import run_stream

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
    for text in read_messages(interactive):
        if text == "/reset":
            conversation.reset()
        elif text == "/help":
            console.print(HELP, style="dim")
        else:
            answered = not refused(text) and _respond(conversation, text, interactive)
    return answered


def _respond(conversation: Conversation, text: str, interactive: bool) -> bool:
    """Answer a message; False where it was too long."""
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
    console.print(figures(turn), style="dim")
    print_notes(turn)
    return True


def _greet(loaded: Loaded, interactive: bool) -> None:
    from specdec_hf.cli.trace import legend, marks_of

    title = f"{loaded.title}, {loaded.dtype}, {loaded.model.device}"
    console.print(visible(f"{title}. {HELP}" if interactive else title), style="dim")
    console.print(legend(marks_of(console)))


def read_messages(interactive: bool) -> Iterator[str]:
    """The user's messages that are not blank, and the commands but ``/exit``, which ends them."""
    bracketed = interactive and sys.stdout.isatty() and _reads_brackets()
    while True:
        try:
            line = _typed(bracketed) if interactive else _next_line()
        except EOFError:
            if interactive:
                console.print()
            return
        except UnicodeDecodeError:
            fail("standard input is not UTF-8 text")
        text = line.strip()
        if text == "/exit":
            return
        if text:
            check_text("the message", text)
            if not interactive:
                console.print(visible(f"{PROMPT}{text}"), style="bold", soft_wrap=True)
            yield text


def refused(text: str) -> bool:
    """Whether a message begins like a command and is none, which is told in one line."""
    found = _COMMAND.match(text)
    if found is None or text in COMMANDS:
        return False
    errors.print(f"error: commands are {', '.join(COMMANDS)}, alone in a message, got {found[0]}")
    return True


def _reads_brackets() -> bool:
    """Let `input` edit lines; whether it takes a paste of several lines as one text.

    Terminals put a paste in brackets for programs that ask for it, as GNU readline does.
    """
    try:
        import readline  # it changes the terminal
    except ImportError:  # Windows
        return False
    return _brackets(readline)


def _brackets(readline: ModuleType) -> bool:
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def _typed(bracketed: bool) -> str:
    text = input(PROMPT)
    while not bracketed and sys.platform != "win32":
        if not select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            break
        text += f"\n{input()}"
    return text


def _next_line() -> str:
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8-sig")


class WordWrap:
    """Breaks lines of a text that comes in pieces; a word is held back until it is complete.

    Args:
        width: of a line in cells; None breaks none, and holds nothing back.
    """

    def __init__(self, width: int | None) -> None:
        self.width = width
        self._column = 0
        self._gap, self._word = Text(), Text()

    def feed(self, piece: Text) -> Text:
        """What can be printed once the text goes on with this piece."""
        if self.width is None:
            return piece
        ready = Text()
        for part in _PARTS.finditer(piece.plain):
            text = piece[part.start() : part.end()]
            if text.plain == "\n":
                ready.append_text(self.rest()).append("\n")
                self._column = 0
            elif text.plain.isspace():
                ready.append_text(self._end_of_word())
                self._gap.append_text(text)
            else:
                if text.plain >= "⺀":
                    ready.append_text(self._end_of_word())
                self._word.append_text(text)
        return ready

    def rest(self) -> Text:
        """What was held back, at the end of the text or of a line."""
        ready = self._end_of_word().append_text(self._gap)
        self._gap = Text()
        return ready

    def _end_of_word(self) -> Text:
        if not self._word:
            return Text()
        assert self.width is not None
        gap, word = self._gap, self._word
        self._gap, self._word = Text(), Text()
        size = cell_len(word.plain)
        column = self._column + cell_len(gap.plain) + (TAB - 1) * gap.plain.count("\t")
        if self._column and column + size > self.width:
            gap, column = Text("\n"), 0
        self._column = (column + size) % self.width if size > self.width else column + size
        return gap.append_text(word)
