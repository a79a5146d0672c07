"""The command ``train``: a head that drafts for a model, from texts of the model itself."""

# ruff: noqa: PLC0415  # torch and Transformers load at first use; see cli/app.py
from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specdec_hf.cli import options
from specdec_hf.cli.checks import DEVICE, DTYPES, check_choice
from specdec_hf.cli.paths import check_folder, check_readable
from specdec_hf.cli.prompts import read_prompts
from specdec_hf.cli.sources import EMBEDDED_NAME, Source, find_model
from specdec_hf.cli.terminal import bar, console, errors, fail, visible

if TYPE_CHECKING:
    from specdec_hf.lab.training.pipeline import TrainingSettings

HEADS = ("eagle3", "medusa", "blockwise", "exit_head", "pass_head")
LICENCE = "Apache-2.0"  # of the embedded model

Head = Annotated[str, typer.Option("--head", metavar="HEAD", help=f"{', '.join(HEADS)}.")]
Output = Annotated[
    Path,
    typer.Option(
        "--output",
        metavar="FOLDER",
        help="Write the head here. A run that was interrupted goes on here.",
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='Prompts to answer, as JSON lines with "turns"; without, the model writes them.',
    ),
]
TextFiles = Annotated[
    list[Path] | None,
    typer.Option("--texts", metavar="FILE", help="Train on these texts. May be repeated."),
]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens of all texts.")]
Minutes = Annotated[
    float | None, typer.Option("--minutes", metavar="X", help="Bound on the time of the whole.")
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", metavar="N", help="Texts of a training step.")
]
Rows = Annotated[
    int, typer.Option("--rows", metavar="N", help="Texts that are written at the same time.")
]
Length = Annotated[int, typer.Option("--length", metavar="N", help="Most tokens of a text.")]
Steps = Annotated[
    int | None,
    typer.Option("--steps", metavar="N", help="Training steps.  [default: all texts four times]"),
]
DraftVocabulary = Annotated[
    int, typer.Option("--draft-vocab-size", metavar="N", help="Tokens that the head can draft.")
]
Layer = Annotated[
    int | None,
    typer.Option(
        "--layer", metavar="N", help="Layers before an early exit.  [default: a third of all]"
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="CPU threads.  [default: torch's]")
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Of the target, and of matrix products in training: float32, bfloat16 or float16.",
    ),
]


def train_command(
    output: Output,
    head: Head = "eagle3",
    model: options.ModelName = "embedded",
    prompts: Prompts = None,
    texts: TextFiles = None,
    tokens: Tokens = 900_000,
    minutes: Minutes = None,
    length: Length = 384,
    rows: Rows = 128,
    batch_size: BatchSize = 4,
    steps: Steps = None,
    draft_vocab_size: DraftVocabulary = 8192,
    layer: Layer = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of texts and training.")] = 0,
    dtype: Dtype = "bfloat16",
    device: options.Device = None,
    threads: Threads = None,
) -> None:
    """Train a head that drafts for a model, for --drafter HEAD:FOLDER.

    The model writes a user's turn after the header of its chat template and answers it; the head
    learns the model's probabilities over these texts.
    """
    check_choice("--head", head, HEADS)
    check_choice("--dtype", dtype, DTYPES[:3])
    if device is not None and not DEVICE.fullmatch(device):
        fail(f"--device must be cpu, cuda, cuda:N or mps, got {device!r}")
    for option, value, least in (
        ("--tokens", tokens, 1), ("--length", length, 8), ("--rows", rows, 1),
        ("--batch-size", batch_size, 1), ("--steps", steps, 1),
        ("--draft-vocab-size", draft_vocab_size, 1), ("--threads", threads, 1),
        ("--layer", layer, 1),
    ):  # fmt: skip
        if value is not None and value < least:
            fail(f"{option} must be at least {least}, got {value}")
    if minutes is not None and not 0 < minutes < float("inf"):
        fail(f"--minutes must be above 0 and finite, got {minutes}")
    if not 0 <= seed < 2**31:
        fail(f"--seed must be in [0, 2**31), got {seed}")
    if layer is not None and head != "exit_head":
        fail(f"--layer needs --head exit_head, got {head}")
    if prompts is not None and texts:
        fail("give either --prompts FILE or --texts FILE, not both")
    for file in texts or ():
        check_readable("--texts", file)
    check_folder("--output", output)
    source = find_model("--model", model)
    turns = [one.turns[0] for one in read_prompts(prompts)] if prompts is not None else []
    read = [_read_text(file) for file in texts or ()]
    from specdec_hf.lab.training.pipeline import TrainingSettings

    settings = TrainingSettings(
        head=head, tokens=tokens, length=length, turn_length=max(1, length // 4), rows=rows,
        steps=steps, batch_size=batch_size, draft_vocab_size=draft_vocab_size, seed=seed,
        layer=layer,
    )  # fmt: skip
    _run(source, settings, output, minutes, dtype, device, threads, turns, read)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fail(f"--texts: {file} is not valid UTF-8 at byte {error.start}")


def _run(
    source: Source,
    settings: TrainingSettings,
    output: Path,
    minutes: float | None,
    dtype: str,
    device: str | None,
    threads: int | None,
    prompts: list[str],
    texts: list[str],
) -> None:
    import torch

    from specdec_hf.cli.load import check_length, find_device, read_config
    from specdec_hf.cli.weights import load_model, load_tokenizer
    from specdec_hf.lab.training.model_card import collect_report, write_report
    from specdec_hf.lab.training.pipeline import Pipeline, check_begun
    from specdec_hf.lab.training.texts import check_prompts

    if threads is not None:
        torch.set_num_threads(threads)
    placed = find_device(device)
    try:
        check_begun(output, settings)
        check_prompts(prompts)
    except ValueError as error:
        fail(str(error))
    with _progress() as progress:
        progress.stage("loading", 1)
        path, config = read_config(source, lambda text: progress.stage(text, 1))
        check_length(settings.length, config)
        tokenizer = load_tokenizer(path)
        model = load_model(path, device=placed, dtype=getattr(torch, dtype))
        try:
            pipeline = Pipeline(model, tokenizer, output, settings, progress, minutes)
            head = pipeline.run(prompts, texts)
        except ValueError as error:
            fail(str(error))
    picture = importlib.util.find_spec("matplotlib") is not None
    report = collect_report(
        pipeline, head, target=source.title, licence=_licence(source), command=_command(),
        data=_data(prompts, texts),
    )  # fmt: skip
    write_report(output, report, picture=picture)
    _print(output, report, picture=picture)


def _licence(source: Source) -> str:
    return f"{LICENCE} as {EMBEDDED_NAME}" if source.kind == "embedded" else "other (the target's)"


def _data(prompts: list[str], texts: list[str]) -> str:
    """Where the texts come from, for the model card."""
    if texts:
        return (
            "those that were given, in pieces; of 20 texts or more every 20th takes no part in "
            "training, of fewer the last 20th of each"
        )
    if prompts:
        return "prompts that were given, and the target's answers"
    return (
        "the target writes a user's turn after the header of its chat template, and answers it; no "
        "prompt of a benchmark takes part"
    )


def _command() -> str:
    """The command that ran, without the folders that lead to files."""
    shown = [os.path.basename(word) if os.path.isabs(word) else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", "specdec_hf", *shown])


def _print(output: Path, report: dict[str, Any], *, picture: bool) -> None:
    greedy = ", ".join(f"{share:.3f}" for share in report["greedy_acceptance"])
    drawn = ", ".join(f"{share:.3f}" for share in report["sampled_acceptance"])
    minutes = sum(report["seconds"].values()) / 60
    console.print(
        f"{report['tokens']:,} tokens, {report['steps']:,} steps, {minutes:.1f} minutes; "
        f"{report['bytes']:,} bytes"
    )
    console.print(f"held-out acceptance of draft 1, 2, ...: {greedy} greedy, {drawn} drawn")
    if not picture:
        console.print("no picture of the curves: matplotlib is not installed", style="dim")
    console.print(visible(f"wrote the head to {output}"), style="dim")


@contextmanager
def _progress() -> Iterator[Any]:
    """The bar of each stage, on standard error where that is a terminal; else a line for each."""
    from specdec_hf.lab.training.pipeline import Progress as Told

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    note = TextColumn("{task.fields[note]}", markup=False)
    shown = bar(*columns, note, TimeElapsedColumn(), TimeRemainingColumn())

    class Shown(Told):
        def stage(self, text: str, total: int) -> None:
            for task in shown.task_ids:
                shown.remove_task(task)
            shown.add_task(text, total=total, note="")
            if not errors.is_interactive:
                errors.print(text)

        def advance(self, done: int, text: str = "") -> None:
            if shown.task_ids:
                shown.update(shown.task_ids[-1], completed=done, note=text)

    with shown:
        yield Shown()
