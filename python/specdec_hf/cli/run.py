"""The run of the commands ``generate`` and ``demo``: load models, answer prompts, report."""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specdec_hf.cli import interrupt
from specdec_hf.cli.checks import (
    GUARDS,
    NEUTRAL,
    Settings,
    Sources,
    check_fit_by_files,
    refuse_drafter,
)
from specdec_hf.cli.devices import find_device
from specdec_hf.cli.prompts import Question
from specdec_hf.cli.report import (
    collect_info,
    print_alone,
    print_example,
    print_figures,
    print_legend,
    print_summary,
    print_text,
    print_title,
    print_turn,
    summarize,
    verdict,
    write_json,
)
from specdec_hf.cli.terminal import FAILED, INTERRUPTED, Terminal, bar, console, errors, fail
from specdec_hf.options import COMMON

if TYPE_CHECKING:
    from specdec_hf.cli.compare import Alone, Turn
    from specdec_hf.cli.explain import Explainer
    from specdec_hf.cli.load import Loaded
    from specdec_hf.decoder import SpeculativeDecoder


TRACED = "note: --trace slows the answers with drafts; without it their speeds can be compared"
LONG = 0.5  # seconds after which a wait has a spinner


@dataclass(frozen=True)
class View:
    """What ``generate`` and ``chat`` show of an answer beside its text.

    Attributes:
        compare: whether it is also made without drafts and with `model.generate`, where the command
            compares at all.
        alone: whether the texts of target and drafter alone are shown.
        drafts: whether accepted drafts and recovered tokens are marked, and rejected drafts shown.
        trace: whether every decision is.
        example: whether one answer is shown once more, with its drafts.
        piped: whether standard output gets texts alone, and standard error all the rest; see
            `view_of`.
    """

    compare: bool = True
    alone: bool = False
    drafts: bool = False
    trace: bool = False
    example: bool = False
    piped: bool = False


def view_of(**shown: bool) -> View:
    """What is shown, where a pipe gets the texts alone unless more than those is asked for."""
    view = View(**shown)
    more = view.alone or view.drafts or view.trace
    return replace(view, piped=not (console.is_terminal or more))


def run(
    prompts: list[Question],
    settings: Settings,
    sources: Sources,
    view: View,
    json_file: Path | None,
) -> None:
    """Answer all prompts, print every answer and a summary, and write the report."""
    with progress_bar() as say:
        loaded = load_models(
            settings, sources, say, functools.partial(check_prompts, prompts, settings)
        )
        decoder = make_decoder(settings, loaded.drafter, loaded.tokenizer)
        say("warming up")
        _warm_up(loaded, decoder, settings, compare=view.compare)

    beside = errors if view.piped else console
    report: list[dict[str, Any]] = []
    turns: list[Turn] = []
    failure: BaseException | None = None
    try:
        for number, prompt in enumerate(prompts, start=1):
            where = f"prompt {number} of {len(prompts)}"
            _answer(prompt, where, settings, loaded, decoder, view, turns, report)
    except (Exception, KeyboardInterrupt) as error:  # earlier answers are still shown and written
        failure = error
    interrupted = interrupt.is_interruption(failure)
    message = f"{prompt}: {str(failure) or type(failure).__name__}"
    if turns:
        rule = turns[0].stats.rule
        summary = summarize(turns, greedy=not settings.do_sample)
        summary |= {
            "model": loaded.title, "dtype": loaded.dtype, "device": str(loaded.model.device),
            "rule": rule, "ablate": settings.ablate,
        }  # fmt: skip
        if not interrupted and not isinstance(failure, BrokenPipeError):
            _print_end(turns, summary, loaded.tokenizer, view, beside)
        content = {
            "info": collect_info(),
            **asdict(settings),
            "dtype": loaded.dtype,
            "device": str(loaded.model.device),
            "rule": rule,
            "summary": summary,
            "prompts": report,
            "error": None if failure is None else "interrupted" if interrupted else message,
        }
        write_json(json_file, content, quiet=failure is not None, terminal=beside)
    if interrupted:
        fail("", INTERRUPTED)
    if isinstance(failure, BrokenPipeError):
        raise failure
    if failure is not None:
        fail(message, FAILED)
    _report_differences(turns, loaded.dtype, beside)


def _print_end(
    turns: list[Turn], summary: dict[str, Any], tokenizer: Any, view: View, beside: Terminal
) -> None:
    """Print what follows the last answer: an example or the legend, the figures, the verdict."""
    from specdec_hf.cli.compare import speeds_of  # it imports Transformers

    if view.example:
        print_example(tokenizer, turns)
    elif view.drafts and summary["drafted"]:
        print_legend()
    print_summary(summary, speeds_of(turns), beside)
    if view.trace and view.compare and summary["drafted"]:
        beside.print(TRACED, style="dim")
    if line := verdict(turns):
        beside.print(line, soft_wrap=True)


def load_models(
    settings: Settings,
    sources: Sources,
    say: Callable[[str], None],
    check_tokenizer: Callable[[Any, Any], None] = lambda tokenizer, config: None,
    refuse: Callable[[str, str], None] | None = None,
) -> Loaded:
    """Import what loads models, and load them; see load.py.

    What a file says of the model is compared with the drafters before that, which takes long.
    """
    say("importing")
    for name in settings.drafter:
        try:
            check_fit_by_files(name, sources.model)
        except ValueError as error:
            (refuse or refuse_drafter)(name, str(error))
    find_device(settings.device)  # torch alone is there much sooner
    from specdec_hf.cli.load import load

    return load(settings, sources, say, check_tokenizer, refuse or refuse_drafter)


def make_decoder(settings: Settings, drafter: Any, tokenizer: Any) -> SpeculativeDecoder:
    """The decoder of checked settings and a loaded drafter, for a model with this tokenizer."""
    from specdec_hf.decoder import SpeculativeDecoder

    own = {name: getattr(settings, name) for name in COMMON}
    given = {"drafter": drafter, "guard": GUARDS[settings.guard], "tokenizer": tokenizer}
    return SpeculativeDecoder(**{**own, **given})


def generation_arguments(settings: Settings) -> dict[str, Any]:
    """Sampling and length as arguments of ``generate``."""
    arguments: dict[str, Any] = {"do_sample": settings.do_sample}
    if settings.do_sample:
        arguments |= settings.sampling
    return {**arguments, "max_new_tokens": settings.max_new_tokens}


def begin_chat(settings: Settings) -> list[dict[str, str]]:
    """The messages before the first of the user."""
    return [] if settings.system is None else [{"role": "system", "content": settings.system}]


def encode(
    tokenizer: Any, chat: list[dict[str, str]], device: Any, *, template: bool = True
) -> dict[str, Any]:
    """``input_ids`` and ``attention_mask`` of a conversation.

    Without ``template``, and where the tokenizer has none, it is that of the last text alone.
    """
    if not template or tokenizer.chat_template is None:
        encoded = tokenizer(chat[-1]["content"], return_tensors="pt")
    else:
        encoded = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _answer(
    prompt: Question,
    where: str,
    settings: Settings,
    loaded: Loaded,
    decoder: SpeculativeDecoder,
    view: View,
    turns: list[Turn],
    report: list[dict[str, Any]],
) -> None:
    """Answer one prompt's turns, and add them to ``turns`` and ``report``."""
    from specdec_hf.cli.compare import Alone, run_turn
    from specdec_hf.detokenizer import decode_behind

    tokenizer = loaded.tokenizer
    answers: list[dict[str, Any]] = []
    entry = {"question_id": prompt.name or None, "category": prompt.category, "turns": answers}
    chat = begin_chat(settings)
    for text in prompt.turns:
        chat.append({"role": "user", "content": text})
        inputs = encode(tokenizer, chat, loaded.model.device, template=settings.chat_template)
        explainer = None
        if view.trace:
            explainer = make_explainer(loaded, inputs, settings)
        with progress() as bar:
            ways = 1 if not view.compare else 2 if decoder.drafter is None else 3
            total = ways * settings.max_new_tokens
            turn = run_turn(
                loaded.model,
                inputs,
                decoder if explainer is None else replace(decoder, trace=explainer),
                generation_arguments(settings),
                compare=view.compare,
                on_tokens=functools.partial(bar.advance, bar.add_task(where, total=total)),
            )
        said = turn.to_dict(tokenizer)
        turns.append(turn)
        answers.append({"prompt": text, **said})
        if len(answers) == 1:
            report.append(entry)
        if view.piped:  # a reader that has gone is noticed before more is said
            print_text(said["text"], first=len(turns) == 1)
            print_title(prompt, text, errors)
            print_figures(turn, errors)
        else:
            print_turn(tokenizer, prompt, text, turn, drafts=view.drafts)
        if explainer is not None:
            from specdec_hf.cli.decisions import print_decisions

            print_decisions(explainer)
            answers[-1] |= explainer.to_dict()
        if view.alone:
            assert turn.plain is not None
            own = decode_behind(tokenizer, turn.prompt, turn.plain.tokens)
            alone = [Alone("target", own, len(turn.plain.tokens), turn.plain.seconds)]
            alone += drafters_alone(loaded, chat, decoder, settings, turn.seed)
            print_alone(alone)
            answers[-1]["alone"] = [one.to_dict() for one in alone]
        chat.append({"role": "assistant", "content": said["text"]})


def make_explainer(loaded: Loaded, inputs: dict[str, Any], settings: Settings) -> Explainer:
    """What explains every decision of an answer: the argument ``trace`` of its decoder."""
    from specdec_hf.cli.compare import prompt_ids
    from specdec_hf.cli.explain import Explainer

    prompt = prompt_ids(loaded.model, inputs)
    sampling = {**NEUTRAL, **settings.sampling}
    return Explainer(loaded.tokenizer, prompt, ", ".join(settings.drafter), sampling)


def drafters_alone(
    loaded: Loaded,
    chat: list[dict[str, str]],
    decoder: SpeculativeDecoder,
    settings: Settings,
    seed: int | None,
) -> list[Alone]:
    """The answers of the draft models alone to the last message of a conversation.

    A note names the drafters that are no language models, which have no text of their own.
    """
    from specdec_hf.cli.compare import answer_alone

    answers = []
    for name, one in zip(settings.drafter, loaded.draft_models(), strict=True):
        if one is None:
            if name != "none":
                console.print(f"note: --drafter {name} has no text of its own", style="dim")
            continue
        inputs = encode(one.tokenizer, chat, one.model.device, template=settings.chat_template)
        arguments = generation_arguments(settings)
        if settings.do_sample:
            arguments |= one.sampling
        answers.append(
            answer_alone(
                f"drafter {name}", one.model, one.tokenizer, inputs, decoder, arguments, seed
            )
        )
    return answers


def _warm_up(
    loaded: Loaded, decoder: SpeculativeDecoder, settings: Settings, *, compare: bool
) -> None:
    """Let the first answer not pay for what only the first call does."""
    from specdec_hf.cli.compare import run_turn

    warm = loaded.tokenizer("Hello there, hello there", return_tensors="pt")
    inputs = {name: warm[name].to(loaded.model.device) for name in ("input_ids", "attention_mask")}
    arguments = {**generation_arguments(settings), "max_new_tokens": 4}
    # Drafters that keep texts must not have met the noise of the answers.
    warming = replace(decoder, seed=None)
    run_turn(loaded.model, inputs, warming, arguments, compare=compare)


def check_prompts(
    prompts: Sequence[Question], settings: Settings, tokenizer: Any, config: Any
) -> None:
    """Refuse prompts longer than the context before the model is loaded."""
    from types import SimpleNamespace

    from specdec_hf.runner.protocol import context_length

    context = context_length(SimpleNamespace(config=config))
    if config.is_encoder_decoder:  # whose decoder has positions of its own
        own = getattr(config, "max_encoder_position_embeddings", context)
        context = None if own is None else own + 1
    for prompt in prompts if context is not None else ():
        chat = [*begin_chat(settings), {"role": "user", "content": prompt.turns[0]}]
        encoded = encode(tokenizer, chat, "cpu", template=settings.chat_template)
        tokens = encoded["input_ids"].shape[1]
        if tokens >= context:
            limit = context - config.is_encoder_decoder
            fail(f"{prompt} has {tokens} tokens, but the model's context is {limit}")


def _report_differences(turns: Sequence[Turn], dtype: str, beside: Terminal) -> None:
    """Texts that were compared and differ: a fault in float32, to be expected in 16 bits."""
    reasons = [turn.difference for turn in turns if turn.difference is not None]
    if not reasons:
        return
    texts = f"{len(reasons)} of {len(turns)} texts differ from {turns[0].compared_with}"
    if dtype == "float32":
        errors.print(f"error: {texts}")
        raise typer.Exit(FAILED)
    why = "; ".join(dict.fromkeys(reasons))
    beside.print(f"note: {texts} in {dtype}, where {why}; in float32 they do not", style="dim")


def progress() -> Progress:
    """The bar that shows what a command does, and for how long."""
    text = TextColumn("{task.description}", markup=False)
    return bar(SpinnerColumn(), text, BarColumn(), TimeElapsedColumn())


@contextmanager
def progress_bar() -> Iterator[Callable[[str], None]]:
    """A bar without an end while models are loaded; yields what changes its text."""
    with progress() as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)


@contextmanager
def spinner(text: str, after: float = LONG) -> Iterator[Callable[[], None]]:
    """A bar without an end, where there is a terminal and the block takes so many seconds.

    Yields what takes it away, for a block that prints.
    """
    waiting = progress()
    waiting.add_task(text, total=None)
    timer = threading.Timer(after, waiting.start)
    timer.daemon = True

    def end() -> None:
        timer.cancel()
        timer.join()  # else it could begin after its end
        waiting.stop()

    if not errors.is_interactive:
        yield lambda: None
        return
    timer.start()
    try:
        yield end
    finally:
        end()
