"""The command ``chat``: messages from standard input, and answers that are printed as they come."""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

import functools
import io
import select
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import typer

from specdec_hf.cli import interrupt
from specdec_hf.cli.checks import Settings, check, check_text
from specdec_hf.cli.commands import EXITS, is_command, run_command
from specdec_hf.cli.conversation import Conversation
from specdec_hf.cli.run import View, load_models, make_decoder, progress_bar
from specdec_hf.cli.terminal import FAILED, console, errors, fail, visible

HELP = "/help lists commands, Ctrl-C stops an answer, and /exit or Ctrl-D ends the chat."
PROMPT = "> "
PASTE_SECONDS = 0.05  # within which the lines of a paste follow one another


def chat(given: Settings, view: View) -> None:
    """Read messages from standard input until it ends, and answer each of them."""
    settings, sources = check(given)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    with progress_bar() as say:
        check_template = functools.partial(_check_template, settings, sources.model.title)
        loaded = load_models(settings, sources, say, check_template)
    decoder = make_decoder(settings, loaded.drafter, loaded.tokenizer)
    conversation = Conversation(loaded, decoder, settings, view, given)
    _greet(conversation, view, interactive)
    try:
        failure = _talk(conversation, interactive)
    except KeyboardInterrupt:
        conversation.beside.print()  # ends the line that the prompt or the answer began
        raise
    if failure:
        fail(failure, FAILED)


def _check_template(settings: Settings, title: str, tokenizer: Any, config: Any) -> None:
    if settings.chat_template and tokenizer.chat_template is None:
        fail(
            f"chat needs a chat template, which the tokenizer of {title} lacks; with "
            "--no-chat-template the model continues each message as text"
        )


def _talk(conversation: Conversation, interactive: bool) -> str:
    """Answer all messages; what became of the last one, or of a command after it, if it failed."""
    failure = ""
    for text in read_messages(interactive):
        if not interactive:
            said = visible(f"{PROMPT}{text}")
            conversation.beside.print(said, style="bold", soft_wrap=True)
        if not is_command(text):
            answered = _respond(conversation, text, interactive)
            failure = "" if answered else "the last message was not answered"
        elif not run_command(conversation, text):
            failure = failure or f"the command {text} was refused"
    return failure


def _respond(conversation: Conversation, text: str, interactive: bool) -> bool:
    """Answer a message; False where it was no text, or too long."""
    from specdec_hf.cli.report import print_figures

    try:
        check_text("the message", text)
    except typer.Exit:  # one line has told why; the conversation is as before
        return False
    try:
        turn = conversation.answer(text)
        print_figures(turn, conversation.beside)
        conversation.show_more(turn)
    except BaseException as error:
        if interactive and interrupt.is_interruption(error):
            conversation.beside.print("the answer was stopped; Ctrl-C again leaves", style="dim")
            interrupt.forget()
            return True
        if not isinstance(error, ValueError):
            raise
        errors.print(visible(f"error: {error}"))  # the next message, or /reset, may still fit
        return False
    return True


def _greet(conversation: Conversation, view: View, interactive: bool) -> None:
    from specdec_hf.cli.report import print_legend

    loaded = conversation.loaded
    title = f"{loaded.title}, {loaded.dtype}, {loaded.model.device}"
    greeting = visible(f"{title}. {HELP}" if interactive else title)
    conversation.beside.print(greeting, style="dim")
    if view.drafts:
        print_legend()


def read_messages(interactive: bool) -> Iterator[str]:
    """The user's messages that are not blank, and the commands but `EXITS`, which end them.

    Bytes that are no UTF-8 become surrogates, which `check_text` refuses, so that a chat goes on.
    """
    if interactive and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    bracketed = interactive and sys.stdout.isatty() and _reads_brackets()
    while True:
        try:
            line = _typed(bracketed) if interactive else _next_line()
        except EOFError:
            if interactive:
                (console if sys.stdout.isatty() else errors).print()
            return
        text = line.strip()
        if text in EXITS:
            return
        if text:
            yield text


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
    if not sys.stdout.isatty():  # where `input` would print the prompt
        errors.print(PROMPT, end="")
    text = input(PROMPT if sys.stdout.isatty() else "")
    while not bracketed and sys.platform != "win32":
        if not select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            break
        text += f"\n{input()}"
    return text


def _next_line() -> str:
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8-sig", "surrogateescape")
