"""Speculative decoding of language models: generate, chat, and what this build can do."""

# torch and transformers are imported inside the commands: --help stays quick, and an import that
# fails (a missing native library) is reported in one line like any other error.
from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table
from typer.core import TyperGroup

from specdec_hf import plugins
from specdec_hf.cli import interrupt, options
from specdec_hf.cli.chat import chat
from specdec_hf.cli.checks import Settings, check, check_text, takes_settings
from specdec_hf.cli.paths import check_json
from specdec_hf.cli.prompts import (
    SHIPPED_PROMPTS,
    STANDARD_INPUT,
    PromptError,
    Question,
    read_prompts,
    read_standard_input,
)
from specdec_hf.cli.report import collect_info, drafter_table, schedule_table, write_json
from specdec_hf.cli.run import View, load_models, progress_bar, run, view_of
from specdec_hf.cli.terminal import (
    FAILED,
    INTERRUPTED,
    WRONG_INPUT,
    close_output,
    console,
    fail,
    prepare_streams,
    visible,
)
from specdec_hf.requirements import explain

Command = TypeVar("Command", bound=Callable[..., None])


class OneLineGroup(TyperGroup):
    """Errors of the parser in one line, like all others."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            # A ClickException, whose class typer has vendored since 0.26.
            message = error.format_message().rstrip(".")
            cause: Any = error.__cause__
            if hasattr(cause, "errors"):  # of pydantic, whose text lacks the value
                message += f", got {cause.errors()[0]['input']!r}"
            code = _exit_code(functools.partial(fail, message, WRONG_INPUT))
        sys.exit(code if isinstance(code, int) else 0)


def _exit_code(action: Callable[[], Any]) -> int:
    try:
        action()
    except typer.Exit as stop:
        return stop.exit_code
    return 0


app = typer.Typer(
    cls=OneLineGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=__doc__,
    epilog="Exit codes: 0, 1 for a failure, 2 for wrong input, 130 for Ctrl-C.",
)


def no_traceback(command: Command) -> Command:
    """Turn the errors of a command into one line."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, typer.Exit | typer.Abort) or hasattr(error, "format_message"):
                raise
            if interrupt.is_interruption(error):
                fail("", INTERRUPTED)
            if isinstance(error, BrokenPipeError):
                raise typer.Exit(FAILED) from None
            if isinstance(error, PromptError):
                fail(str(error))
            if isinstance(error, OSError) and error.strerror:
                where = f"{error.filename}: " if error.filename else ""
                fail(f"{where}{error.strerror}", FAILED)
            if isinstance(error, ImportError):
                fail(explain(error), FAILED)
            if isinstance(error, ValueError | RuntimeError | OSError):
                fail(str(error) or type(error).__name__, FAILED)
            fail(f"unexpected {type(error).__name__}: {error}", FAILED)

    return wrapped  # type: ignore[return-value]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.")
    ] = False,
) -> None:
    if show_version:
        console.print(f"specdec-kernels {_version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("generate")
@no_traceback
@takes_settings()
def generate_command(
    *,
    prompt: options.PromptText = None,
    prompts: options.PromptFile = None,
    settings: Settings,
    limit: options.Limit = None,
    compare: options.Compare = True,
    alone: options.Alone = False,
    show_drafts: options.ShowDrafts = False,
    trace: options.Traced = False,
    json_file: options.JsonFile = None,
) -> None:
    """Answer prompts, and compare speeds with drafts, without, and of model.generate.

    Where standard output is no terminal it gets the texts of the answers alone, with an empty line
    between two, and standard error the rest. With --show-drafts, --trace or --alone it gets all.
    """
    if prompt is None and prompts is None:
        fail("give either --prompt TEXT or --prompts FILE")
    if alone and not compare:
        fail("--alone shows what --compare runs, got --no-compare")
    view = view_of(compare=compare, alone=alone, drafts=show_drafts, trace=trace)
    _answer(prompt, prompts, settings, limit, json_file, view)


@app.command("chat")
@no_traceback
@takes_settings(max_new_tokens=512)
def chat_command(
    settings: Settings,
    alone: options.Alone = False,
    show_drafts: options.ShowDrafts = False,
    trace: options.Traced = False,
) -> None:
    """Talk to a model; answers are printed as they come.

    /help lists the commands of a conversation, which change it as it goes on. Ctrl-D ends. Where
    standard output is no terminal it gets the answers alone, as with generate.
    """
    chat(settings, view_of(alone=alone, drafts=show_drafts, trace=trace))


@app.command("demo")
@no_traceback
def demo_command(
    prompt: options.PromptText = None,
    prompts: options.PromptFile = None,
    max_new_tokens: options.MaxNewTokens = 128,
    limit: options.Limit = None,
    compile: options.Compile = None,
    json_file: options.JsonFile = None,
) -> None:
    """Answer the shipped prompts greedily, and show the drafts of one answer."""
    if prompt is None and prompts is None:
        prompts = str(SHIPPED_PROMPTS)
    settings = Settings(max_new_tokens=max_new_tokens, compile=compile)
    _answer(prompt, prompts, settings, limit, json_file, View(example=True))
    console.print("the same for a text of your own: generate --prompt TEXT")


def _answer(
    prompt: str | None,
    prompts: str | None,
    settings: Settings,
    limit: int | None,
    json_file: Path | None,
    view: View,
) -> None:
    if prompt is not None and prompts is not None:
        fail("give either --prompt TEXT or --prompts FILE, not both")
    if prompt is not None:
        check_text("--prompt", prompt)
    check_json(json_file, prompts)
    settings, sources = check(settings)
    chosen = _read_prompt(prompt) if prompt is not None else read_prompts(prompts or "")
    run(chosen[:limit], settings, sources, view, json_file)


@app.command("check")
@no_traceback
def check_command(
    model: options.ModelName = "embedded",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
) -> None:
    """Show which caches fit a model.

    A cache that does not fit would change the text, so the loop takes another one or refuses.
    Differences are those of logits, in units of their standard deviation.
    """
    settings, sources = check(Settings(model=model, dtype=dtype, device=device))
    with progress_bar() as say:
        loaded = load_models(settings, sources, say)
        from specdec_hf.model_check import check_model  # noqa: PLC0415

        say("comparing")
        result = check_model(loaded.model)
    console.print(visible(f"{loaded.title}, {loaded.dtype}, {loaded.model.device}"), style="bold")
    console.print(visible(str(result)), soft_wrap=True)
    if all(fit.reason for fit in result.fits.values()):
        fail(f"no cache fits {loaded.title}", FAILED)


build = typer.Typer(cls=OneLineGroup, rich_markup_mode=None)


@build.callback(invoke_without_command=True)
def build_group(context: typer.Context) -> None:
    """Make files that drafters read."""
    if context.invoked_subcommand is None:
        assert isinstance(context.command, OneLineGroup)
        fail(f"build needs one of {', '.join(context.command.list_commands(context))}")


@app.command("info")
@no_traceback
def info_command(
    json_file: options.JsonFile = None,
) -> None:
    """Show versions, the provider of each op, the devices, heads, drafters and schedules."""
    check_json(json_file)
    info = collect_info()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in info["versions"].items():
        table.add_row(name, value)
    for op, by_device in info["providers"].items():
        table.add_row(op, ", ".join(f"{device}: {name}" for device, name in by_device.items()))
    table.add_row("cpu instructions", info["cpu_capability"])
    table.add_row("threads", str(info["threads"]))
    table.add_row("gpu", info["gpu"])
    none = "not built; SPECDEC_CUDA=all builds them where there is nvcc"
    table.add_row("CUDA kernels", "built" if info["cuda_kernels"] else none)
    table.add_row("heads shipped for", ", ".join(info["shipped_heads"]) or "no model")
    console.print(table)
    console.print("\ndrafters, for --drafter:")
    console.print(drafter_table())
    console.print("\nschedules, for --num-assistant-tokens-schedule:")
    console.print(schedule_table())
    write_json(json_file, info)


app.add_typer(build, name="build")
COMMANDS = "specdec.commands"  # the entry points of installed packages


def _add(name: str) -> None:
    """Add a command of an installed package; one that cannot be loaded says so where it is called.

    Raises:
        ValueError: a name that another command has.
    """
    group, short = (build, name.removeprefix("build.")) if "." in name else (app, name)
    taken = {one.name for one in group.registered_commands} | {"build"}
    if short in taken:
        place = plugins.entry_points_of(COMMANDS)[name].value
        raise ValueError(f"commands must differ in name, got {name!r} of {COMMANDS} for {place}")
    try:
        group.command(short)(no_traceback(plugins.load(name, COMMANDS)))
    except Exception as error:  # whatever a package raises as it is imported
        reason = f"{name}: {error}"
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        group.command(short, context_settings=anything, help=f"It cannot be loaded: {error}")(
            lambda: fail(reason, FAILED)
        )


for added in sorted(plugins.entry_points_of(COMMANDS)):
    _add(added)


def _version() -> str:
    try:
        return version("specdec-kernels")
    except PackageNotFoundError:  # run from a source tree
        import specdec_kernels  # noqa: PLC0415

        return specdec_kernels.__version__


def _read_prompt(text: str) -> list[Question]:
    if text == STANDARD_INPUT:
        text = read_standard_input()
        check_text("standard input", text)
    return [Question("", "", [text])]


def main() -> None:
    """Entry point of ``python -m specdec_hf``."""
    prepare_streams()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # without its hints to developers
    try:
        app(prog_name="python -m specdec_hf")
    finally:
        complete = close_output()
    if not complete:
        sys.exit(FAILED)
