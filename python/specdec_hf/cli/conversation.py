"""A conversation: its messages, the cache of its last answer, and how the next one is made.

The cache of an answer serves the next one where the new conversation begins with exactly the tokens
that the cache holds. Templates that rewrite earlier answers, such as those that drop their
reasoning, make the model read the conversation again.
"""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from specdec_hf.cli import interrupt
from specdec_hf.cli.checks import Settings, check
from specdec_hf.cli.run import (
    View,
    begin_chat,
    drafters_alone,
    encode,
    generation_arguments,
    make_decoder,
    make_explainer,
    spinner,
)
from specdec_hf.cli.terminal import Terminal, WordWrap, console, errors, visible
from specdec_hf.rules import LOSSY_RULES

if TYPE_CHECKING:
    from specdec_hf.cli.compare import Turn
    from specdec_hf.cli.explain import Explainer
    from specdec_hf.cli.load import Loaded
    from specdec_hf.cli.trace import Shown
    from specdec_hf.decoder import SpeculativeDecoder
    from specdec_hf.loop.streaming import Step

NGRAM = "nasd"  # the drafter of /ngram


@dataclass
class Switches:
    """What is made and shown of each answer of a conversation.

    Attributes:
        speculative: whether the target's answer is drafted.
        target, drafter: whether the target and the draft models answer alone too.
        ngram: whether the target's answer is also drafted by counted n-grams.
        cache: whether the keys and values of an answer serve the next one.
        drafts: whether tokens of the answers are marked, and rejected drafts shown.
        debug: whether every decision is shown.
    """

    speculative: bool = True
    target: bool = False
    drafter: bool = False
    ngram: bool = False
    cache: bool = True
    drafts: bool = False
    debug: bool = False


class Conversation:
    """Messages so far, the cache of the last answer, and how the next one is made.

    Args:
        loaded: the models.
        decoder: of the settings.
        settings: checked ones.
        view: what is shown of the answers; commands may change it.
        given: the settings before their check, which commands change; None for the same.
    """

    def __init__(
        self,
        loaded: Loaded,
        decoder: SpeculativeDecoder,
        settings: Settings,
        view: View = View(),  # noqa: B008  # it cannot be changed
        given: Settings | None = None,
    ) -> None:
        self.loaded = loaded
        self.decoder = decoder
        self.settings = settings
        self.given = settings if given is None else given
        writes = view.alone and any(loaded.draft_models())
        self.explainer: Explainer | None = None
        self._piped, self._gap = view.piped, False
        self.switches = Switches(
            target=view.alone, drafter=writes, drafts=view.drafts, debug=view.trace
        )
        self.reset()

    @property
    def piped(self) -> bool:
        """Whether standard output gets answers alone: a pipe, unless a switch asks for more."""
        on = self.switches
        return self._piped and not (on.target or on.drafter or on.ngram or on.drafts or on.debug)

    @property
    def beside(self) -> Terminal:
        """Where all but the answers is printed."""
        return errors if self.piped else console

    def change(self, **values: Any) -> None:
        """Take other settings from the next answer on, or leave them where they are refused.

        Raises:
            typer.Exit: they are, which one line has told.
            ValueError: they do not fit the drafter.
        """
        given = replace(self.given, **values)
        settings, _ = check(given)
        decoder = make_decoder(settings, self.loaded.drafter, self.loaded.tokenizer)
        self.given, self.settings, self.decoder = given, settings, decoder

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
        from specdec_hf.cli.compare import Turn, prompt_ids
        from specdec_hf.cli.trace import PieceStream
        from specdec_hf.loop.streaming import run_stream
        from specdec_hf.runner.protocol import CACHE_NAME, is_encoder_decoder

        messages = [*self.messages, {"role": "user", "content": text}]
        inputs = self._encode(messages)
        ids = inputs["input_ids"][0].tolist()
        past = self.past if self._continues(ids) else None
        decoder = self._decoder(inputs)
        began = time.perf_counter()
        stream = decoder.stream(
            self.loaded.model,
            **inputs,
            **generation_arguments(self.settings),
            past_key_values=past,
            return_dict_in_generate=True,
        )
        prompt = prompt_ids(self.loaded.model, inputs)
        pieces = PieceStream(self.loaded.tokenizer, prompt, rejected=self.switches.drafts)
        writer = _Writer(marked=self.switches.drafts, piped=self.piped, gap=self._gap)
        unread = len(ids) - (0 if past is None else len(self.cached))
        try:
            with spinner(f"reading {unread:,} tokens") as is_read:

                def show(step: Step) -> None:
                    is_read()
                    for piece, kind in pieces.feed(step):
                        writer.write(piece, kind)

                steps, output = run_stream(stream, show)
        except BaseException as error:
            if interrupt.is_interruption(error):
                stream.close()
                self._gap = writer.end()
                self.past, self.cached = None, []  # the stream has changed the cache
                self.messages = [*messages, _said(pieces.text)]
            raise
        writer.write(*pieces.rest())
        self._gap = writer.end()
        turn = Turn(len(ids), steps, output.stats, time.perf_counter() - began, prompt=prompt)
        if self.settings.do_sample:
            turn.seed = output.stats.seeds[0]
        sequence = output.sequences[0].tolist()
        self.past, self.cached = getattr(output, CACHE_NAME), sequence[:-1]
        if is_encoder_decoder(self.loaded.model):  # its cache holds the answer and no message
            self.past, self.cached = None, []
        self.messages = [*messages, _said(pieces.text)]
        return turn

    def _continues(self, ids: list[int]) -> bool:
        """Whether the cache of the last answer holds the beginning of these tokens."""
        known = len(self.cached)
        return self.switches.cache and 0 < known < len(ids) and ids[:known] == self.cached

    def _decoder(self, inputs: dict[str, Any]) -> SpeculativeDecoder:
        """The decoder of the next answer, by the switches."""
        from specdec_hf.cli.compare import plain_decoder

        decoder, self.explainer = self.decoder, None
        if not self.switches.speculative:
            decoder = plain_decoder(decoder, decoder.rule, decoder.seed)
        if self.switches.debug:
            self.explainer = make_explainer(self.loaded, inputs, self.settings)
            decoder = replace(decoder, trace=self.explainer)
        return decoder

    def show_more(self, turn: Turn) -> None:
        """Print what is switched on: the decisions of the last answer, and other answers.

        Args:
            turn: the last answer, with which the conversation goes on.
        """
        from specdec_hf.cli.compare import answer_alone, run_turn
        from specdec_hf.cli.report import figures, print_alone, print_answer

        if self.explainer is not None:
            from specdec_hf.cli.decisions import print_decisions

            print_decisions(self.explainer)
        messages, loaded = self.messages[:-1], self.loaded
        arguments, inputs = generation_arguments(self.settings), self._encode(messages)
        if self.switches.target:
            target = (loaded.model, loaded.tokenizer, inputs)
            print_alone([answer_alone("target", *target, self.decoder, arguments, turn.seed)])
        if self.switches.drafter:
            print_alone(drafters_alone(loaded, messages, self.decoder, self.settings, turn.seed))
        if self.switches.ngram:
            decoder = replace(self._ngram_decoder(), seed=turn.seed)
            counted = run_turn(loaded.model, inputs, decoder, arguments, compare=False)
            console.print(f"drafted by {NGRAM}", style="bold")
            print_answer(loaded.tokenizer, counted, drafts=self.switches.drafts)
            console.print(figures(counted), style="dim")

    def _ngram_decoder(self) -> SpeculativeDecoder:
        """The decoder of ``/ngram``: chains by counted n-grams, with the settings they take."""
        lossless: dict[str, Any] = {name: None for x in LOSSY_RULES.values() for name in x}
        given = replace(
            self.given, drafter=[NGRAM], tree=None, cascade=None, ablate=None, rule="auto",
            num_assistant_tokens_schedule=None, **lossless,
        )  # fmt: skip
        settings, _ = check(given)
        return make_decoder(settings, NGRAM, self.loaded.tokenizer)

    def _encode(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return encode(
            self.loaded.tokenizer, messages, self.loaded.model.device,
            template=self.settings.chat_template,
        )  # fmt: skip


class _Writer:
    """Prints an answer as it comes: as it is into a pipe, else in lines of the terminal's width.

    Args:
        marked: whether tokens are marked by their kinds.
        piped: whether standard output gets answers alone.
        gap: whether an empty line comes first there, between answers.
    """

    def __init__(self, *, marked: bool, piped: bool, gap: bool) -> None:
        from specdec_hf.cli.trace import marks_of

        self._marks, self._piped, self._gap = marks_of(console) if marked else None, piped, gap
        self._wrap = WordWrap(console.width if console.is_terminal else None)

    def write(self, piece: str, kind: Shown) -> None:
        from specdec_hf.cli.trace import styled

        if self._piped:
            console.write(f"\n{piece}" if self._gap else piece)
            self._gap = False
            return
        text = Text(visible(piece)) if self._marks is None else styled(piece, kind, self._marks)
        console.print(self._wrap.feed(text), end="", soft_wrap=True)

    def end(self) -> bool:
        """End the last line; whether the next answer needs a gap."""
        console.print(self._wrap.rest(), soft_wrap=True)
        return self._piped


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
