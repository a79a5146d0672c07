"""The commands of a conversation: messages that begin with a slash and change how it goes on.

They are those of the interactive program of https://github.com/romsto/Speculative-Decoding, and
some of this library. A command that is refused changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from specdec_hf.arguments import check_integer
from specdec_hf.cli.checks import NEUTRAL
from specdec_hf.cli.options import check_choice
from specdec_hf.cli.report import print_legend
from specdec_hf.cli.terminal import console, errors, visible
from specdec_hf.options import COMMON

if TYPE_CHECKING:
    from specdec_hf.cli.conversation import Conversation

EXITS = ("/exit", "/quit")
# A path such as /etc/hosts at the beginning of a message is none.
_COMMAND = re.compile(r"/[\w?-]*(?!\S)")
ALIKE = 0.6  # of two names, as difflib counts it
# The sampling parameters that each processor takes, in the order of the values.
PROCESSORS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    "multinomial": ("temperature",),
    "topk": ("temperature", "top_k"),
    "nucleus": ("temperature", "top_p"),
    "topknucleus": ("temperature", "top_k", "top_p"),
    "minp": ("temperature", "min_p"),
}


@dataclass(frozen=True)
class Command:
    """A command of a conversation.

    Attributes:
        text: what it does.
        action: called with the conversation and the values behind the name; raises ValueError.
        values: what these are, for users; empty where none may be.
        state: how the conversation is set, for users.
    """

    text: str
    action: Callable[[Conversation, Sequence[str]], None]
    values: str = ""
    state: Callable[[Conversation], str] = lambda conversation: ""


def is_command(text: str) -> bool:
    """Whether a message begins as a command does."""
    return _COMMAND.match(text) is not None


def run_command(conversation: Conversation, text: str) -> bool:
    """Obey a message that is a command; one that is refused gets one line, and is False."""
    name, *values = text.split()
    try:
        command = _find(name)
        if values and not command.values:
            raise ValueError(f"{name} takes no value, got {' '.join(values)!r}")
        command.action(conversation, values)
    except ValueError as error:
        errors.print(visible(f"error: {error}"))
        return False
    except typer.Exit:  # the check has told why
        return False
    state = command.state(conversation)
    if state:
        conversation.beside.print(f"{name}: {state}", style="dim")
    return True


def _find(name: str) -> Command:
    if name in COMMANDS:
        return COMMANDS[name]
    begun = [one for one in COMMANDS if one.startswith(name.lower()) and name != "/"]
    close = [*begun, *get_close_matches(name.lower(), COMMANDS, 1, ALIKE)]
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    raise ValueError(f"there is no command {name!r}{hint} /help lists all")


def _print_help(conversation: Conversation, values: Sequence[str]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, command in COMMANDS.items():
        state = command.state(conversation)
        table.add_row(f"{name} {command.values}".rstrip(), command.text, state)
    terminal = conversation.beside
    terminal.print(table, style="dim", soft_wrap=False)
    terminal.print("Ctrl-C stops an answer, and Ctrl-D ends the conversation.", style="dim")


def _switch(name: str, text: str) -> Command:
    """A command that turns one of the `Switches` on or off."""

    def turn(conversation: Conversation, values: Sequence[str]) -> None:
        on = not getattr(conversation.switches, name)
        if name == "drafter" and on and not any(conversation.loaded.draft_models()):
            given = " ".join(f"--drafter {one}" for one in conversation.settings.drafter)
            raise ValueError(f"/drafter needs a drafter that is a language model, got {given}")
        setattr(conversation.switches, name, on)

    def state(conversation: Conversation) -> str:
        return "on" if getattr(conversation.switches, name) else "off"

    return Command(text, turn, state=state)


def _show_drafts(conversation: Conversation, values: Sequence[str]) -> None:
    conversation.switches.drafts = not conversation.switches.drafts
    if conversation.switches.drafts:
        print_legend()


def _set_gamma(conversation: Conversation, values: Sequence[str]) -> None:
    number = COMMON["num_assistant_tokens"].metadata["check"]("/gamma", _integer("/gamma", values))
    if number == 0:
        raise ValueError("/gamma must be at least 1, got 0; /speculative turns drafts off")
    conversation.change(num_assistant_tokens=number)


def _set_length(conversation: Conversation, values: Sequence[str]) -> None:
    number = check_integer("/length", _integer("/length", values), 1, 2**31 - 1)
    conversation.change(max_new_tokens=number)


def _integer(name: str, values: Sequence[str]) -> int:
    try:
        (value,) = values
        return int(value)
    except ValueError:
        raise ValueError(f"{name} takes one integer, got {' '.join(values)!r}") from None


def _set_processor(conversation: Conversation, values: Sequence[str]) -> None:
    name, *numbers = values or [""]
    check_choice("/processor", name, tuple(PROCESSORS))
    parameters = PROCESSORS[name]
    try:
        pairs = zip(parameters, numbers, strict=True)
        given = {one: int(x) if one == "top_k" else float(x) for one, x in pairs}
    except ValueError:
        takes = ", ".join(parameters) or "no value"
        raise ValueError(f"/processor {name} takes {takes}, got {' '.join(numbers)!r}") from None
    conversation.change(sampling={"temperature": 0.0, **dict.fromkeys(NEUTRAL), **given})


def _gamma(conversation: Conversation) -> str:
    number: int | None = conversation.settings.num_assistant_tokens
    return "the drafter's own" if number is None else str(number)


def _processor(conversation: Conversation) -> str:
    sampling: dict[str, Any] = conversation.settings.sampling
    if not conversation.settings.do_sample:
        return "greedy"
    set_ones = {name: x for name, x in sampling.items() if NEUTRAL.get(name) != x}
    return ", ".join(f"{name} {x:g}" for name, x in set_ones.items())


COMMANDS: dict[str, Command] = {
    "/help": Command("lists the commands and how they are set", _print_help),
    "/reset": Command("forgets the conversation", lambda conversation, _: conversation.reset()),
    "/clear": Command("clears the screen", lambda *_: console.clear()),
    "/speculative": _switch("speculative", "drafts the target's answer"),
    "/target": _switch("target", "lets the target answer alone, too"),
    "/drafter": _switch("drafter", "lets the draft models answer alone, too"),
    "/ngram": _switch("ngram", "answers once more, drafted by counted n-grams (nasd)"),
    "/cache": _switch("cache", "lets the cache of an answer serve the next one"),
    "/drafts": Command(
        "marks accepted drafts and recovered tokens, and shows rejected drafts", _show_drafts,
        state=lambda conversation: "on" if conversation.switches.drafts else "off",
    ),
    "/debug": _switch("debug", "shows every draft with Q, P, uniform and verdict, and trees"),
    "/gamma": Command("tokens to draft in each round", _set_gamma, "N", _gamma),
    "/length": Command(
        "most tokens of an answer", _set_length, "N",
        lambda conversation: str(conversation.settings.max_new_tokens),
    ),
    "/processor": Command(
        f"how tokens are sampled: {', '.join(PROCESSORS)}, and their parameters",
        _set_processor, "NAME X..", _processor,
    ),
    **dict.fromkeys(EXITS, Command("ends the conversation", lambda *_: None)),
}  # fmt: skip
