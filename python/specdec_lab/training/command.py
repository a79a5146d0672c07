"""The command ``train``: a head or a draft model, from texts of the target itself."""

# ruff: noqa: PLC0415  # torch and Transformers load at first use; see cli/app.py
from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from specdec_hf.cli import options
from specdec_hf.cli.devices import find_device
from specdec_hf.cli.options import DTYPES, POSITIVE, SEED, SHARE, at_least, must_be, one_of, option
from specdec_hf.cli.paths import check_folder, check_readable
from specdec_hf.cli.prompts import read_prompts
from specdec_hf.cli.sources import EMBEDDED_NAME, Source, find_model
from specdec_hf.cli.terminal import FAILED, bar, console, errors, fail, visible

from specdec_lab.training.settings import (
    DRAFT_MODEL,
    LARGEST_LEARNING_RATE,
    LOSSES,
    RUN,
    WORK,
    TrainingSettings,
)

HEADS = ("eagle3", "medusa", "blockwise", "exit_head", "pass_head")
WHOLE_VOCABULARY = ("exit_head", "pass_head")  # what these draft
LICENCE = "Apache-2.0"  # of the embedded model


def train_command(
    output: Annotated[
        Path,
        option(
            "--output FOLDER",
            "Write head or draft model here. A run that was interrupted goes on here.",
        ),
    ],
    head: Annotated[
        str, option("--head HEAD", f"{', '.join(HEADS)}.", one_of(*HEADS))
    ] = TrainingSettings.head,
    model: options.ModelName = "embedded",
    prompts: Annotated[
        str | None,
        option(
            "--prompts FILE",
            'Prompts to answer, as JSON lines with "turns"; without, the model writes them.',
        ),
    ] = None,
    openings: Annotated[
        float,
        option(
            "--openings X",
            "Share of the users' turns whose first words are given, such as those of a question.",
            SHARE,
        ),
    ] = TrainingSettings.openings,
    texts: Annotated[
        list[Path] | None, option("--texts FILE", "Train on these texts. May be repeated.")
    ] = None,
    tokens: Annotated[
        int, option("--tokens N", "Tokens of all texts.", at_least(1))
    ] = TrainingSettings.tokens,
    minutes: Annotated[
        float | None, option("--minutes X", "Bound on the time of the whole.", POSITIVE)
    ] = None,
    length: Annotated[
        int, option("--length N", "Most tokens of a text.", at_least(8))
    ] = TrainingSettings.length,
    turn_length: Annotated[
        int | None,
        option(
            "--turn-length N",
            "Most tokens of a user's turn that the model writes.  [default: a quarter of --length]",
            at_least(1),
        ),
    ] = None,
    rows: Annotated[
        int, option("--rows N", "Texts that are written at the same time.", at_least(1))
    ] = TrainingSettings.rows,
    batch_size: Annotated[
        int, option("--batch-size N", "Texts of a training step.", at_least(1))
    ] = TrainingSettings.batch_size,
    steps: Annotated[
        int | None,
        option("--steps N", "Training steps.  [default: all texts four times]", at_least(1)),
    ] = None,
    draft_steps: Annotated[
        int | None,
        option(
            "--draft-steps N",
            "Drafts of one round that are learnt, or heads or look-ahead embeddings.  "
            f"[default: {TrainingSettings.draft_steps}]",
            at_least(1),
            must_be("at most 1023", lambda steps: steps < 1024),  # a round drafts 1024 at most
        ),
    ] = None,
    learning_rate: Annotated[
        float,
        option(
            "--learning-rate X",
            "The largest one of the schedule.",
            POSITIVE,
            must_be(f"at most {LARGEST_LEARNING_RATE:g}", lambda x: x <= LARGEST_LEARNING_RATE),
        ),
    ] = TrainingSettings.learning_rate,
    draft_vocab_size: Annotated[
        int | None,
        option(
            "--draft-vocab-size N",
            f"Tokens that a head can draft.  [default: {TrainingSettings.draft_vocab_size}]",
            at_least(1),
        ),
    ] = None,
    layer: Annotated[
        int | None,
        option("--layer N", "Layers before an early exit.  [default: a third of all]", at_least(1)),
    ] = None,
    draft_model: Annotated[
        bool, option("--draft-model", "Train a small Llama in the place of a head.")
    ] = False,
    width: Annotated[
        int | None,
        option(
            "--width N",
            f"Of a draft model, a multiple of 32.  [default: {TrainingSettings.width}]",
            at_least(32),
            must_be("a multiple of 32", lambda width: width % 32 == 0),
        ),
    ] = None,
    num_layers: Annotated[
        int | None,
        option(
            "--num-layers N",
            f"Of a draft model.  [default: {TrainingSettings.num_layers}]",
            at_least(1),
        ),
    ] = None,
    loss: Annotated[
        str,
        option(
            "--loss LOSS",
            f"{', '.join(LOSSES)}. The first half of the steps has the first.",
            one_of(*LOSSES),
        ),
    ] = TrainingSettings.loss,
    on_policy: Annotated[
        float | None,
        option(
            "--on-policy X",
            "Share of the steps whose answers a draft model writes itself.  [default: 0]",
            SHARE,
        ),
    ] = None,
    num_drafters: Annotated[
        int | None,
        option(
            "--num-drafters N",
            "Draft models for one tree, each trained on what those before it miss. They go to "
            "folders 1, 2, ... of --output.  [default: 1, in --output itself]",
            at_least(1),
            must_be("at most 1024", lambda number: number <= 1024),  # nodes of a tree
        ),
    ] = None,
    reuse: Annotated[
        Path | None,
        option("--reuse FOLDER", "Train on the texts and states of the run in this folder."),
    ] = None,
    resume: Annotated[
        Path | None,
        option("--resume FOLDER", "Begin with the weights of the EAGLE-3 head in FOLDER."),
    ] = None,
    seed: Annotated[
        int, option("--seed N", "Of texts and training.", SEED)
    ] = TrainingSettings.seed,
    dtype: Annotated[
        str,
        option(
            "--dtype DTYPE",
            "Of the target, and of matrix products in training: float32, bfloat16 or float16.",
            one_of(*DTYPES[:3]),
        ),
    ] = "bfloat16",
    device: options.Device = None,
    threads: Annotated[
        int | None,
        option(
            "--threads N",
            "CPU threads.  [default: torch's]",
            at_least(1),
            must_be("at most 1024", lambda number: number <= 1024),  # more take minutes to begin
        ),
    ] = None,
) -> None:
    """Train a head for --drafter HEAD:FOLDER, or a draft model for --drafter FOLDER.

    The model writes a user's turn after the header of its chat template and answers it; the drafter
    learns the model's probabilities over these texts.
    """
    if draft_model:
        if head != TrainingSettings.head:
            fail("give either --draft-model or --head HEAD, not both")
        if draft_vocab_size is not None:
            fail(
                "--draft-vocab-size needs a head: a draft model drafts the whole vocabulary, got "
                f"{draft_vocab_size}"
            )
        head = DRAFT_MODEL
    else:
        for name, given in (
            ("--width", width), ("--num-layers", num_layers), ("--on-policy", on_policy),
            ("--num-drafters", num_drafters),
        ):  # fmt: skip
            if given is not None:
                fail(f"{name} needs --draft-model, got --head {head}")
    if draft_vocab_size is not None and head in WHOLE_VOCABULARY:
        fail(
            f"--draft-vocab-size needs a head that drafts a part of the vocabulary, got {head} and "
            f"{draft_vocab_size}"
        )
    if layer is not None and head != "exit_head":
        fail(f"--layer needs --head exit_head, got {head}")
    if draft_steps is not None and head in (DRAFT_MODEL, "exit_head"):
        fail(f"--draft-steps needs a head that reads its own drafts or none, got {head}")
    if draft_steps is not None and draft_steps >= length:
        fail(f"--draft-steps must be below --length, {length}, got {draft_steps}")
    if resume is not None and head != "eagle3":
        fail(f"--resume needs --head eagle3, got {head}")
    if resume is not None:
        check_readable("--resume", resume / "config.json")
    if resume is not None and resume.resolve() == output.resolve():
        fail(f"--resume must be another folder than --output, got {resume}")
    sources = {"--prompts": prompts, "--texts": texts, "--reuse": reuse}
    others = [name for name, other in sources.items() if other]
    if openings and others:
        fail(f"--openings needs turns that the model writes, and {others[0]} is given")
    if turn_length is not None:
        if others:
            fail(f"--turn-length needs turns that the model writes, and {others[0]} is given")
        if turn_length > length // 2:  # the other half is for the answer
            fail(
                f"--turn-length must be at most half of --length, {length // 2}, got {turn_length}"
            )
    if (prompts is not None) + bool(texts) + (reuse is not None) > 1:
        fail("give one of --prompts FILE, --texts FILE and --reuse FOLDER")
    for file in texts or ():
        check_readable("--texts", file)
    check_folder("--output", output)
    source = find_model("--model", model)
    folders = [output]
    if num_drafters is not None and num_drafters > 1:
        folders = [output / str(number) for number in range(1, num_drafters + 1)]
    for folder in (output, *folders):
        _check_is_own(folder, source, folders)
    turns = [one.turns[0] for one in read_prompts(prompts)] if prompts is not None else []
    read = [_read_text(file) for file in texts or ()]
    settings = TrainingSettings(
        head=head, tokens=tokens, length=length, turn_length=turn_length or max(1, length // 4),
        rows=rows, steps=steps, batch_size=batch_size,
        draft_vocab_size=draft_vocab_size or TrainingSettings.draft_vocab_size, seed=seed,
        layer=layer, loss=loss, openings=openings, on_policy=on_policy or 0.0,
        width=width or TrainingSettings.width,
        num_layers=num_layers or TrainingSettings.num_layers, learning_rate=learning_rate,
        draft_steps=draft_steps or TrainingSettings.draft_steps,
    )  # fmt: skip
    _run(
        source, settings, folders, minutes, dtype, device, threads, turns, read, reuse, resume,
        draft_vocab_size,
    )  # fmt: skip


def _check_is_own(output: Path, source: Source, folders: Sequence[Path]) -> None:
    """Refuse the folder of the target, and one with files that no run has written.

    Args:
        output: the folder of a drafter, or that of all of them.
        source: the target.
        folders: of each drafter.
    """
    if output.exists() and source.path.exists() and output.samefile(source.path):
        fail(f"--output must not be the folder of {source.option}, got {output}")
    inside = [one for one in folders if one.parent == output]
    if not output.exists() or any((one / WORK / RUN).exists() for one in (output, *inside)):
        return
    foreign = {one.name for one in output.iterdir()} - {WORK, *(one.name for one in inside)}
    if foreign:
        fail(
            f"--output must be a new folder, an empty one or that of an earlier run, and {output} "
            f"holds {min(foreign)} and no {WORK}/{RUN}"
        )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fail(f"--texts: {file} is not valid UTF-8 at byte {error.start}")


def _run(
    source: Source,
    settings: TrainingSettings,
    folders: list[Path],
    minutes: float | None,
    dtype: str,
    device: str | None,
    threads: int | None,
    prompts: list[str],
    texts: list[str],
    reuse: Path | None,
    resume: Path | None,
    draft_vocab_size: int | None,
) -> None:
    """Train a drafter in each folder; the later ones learn what those before them miss."""
    import torch
    from specdec_hf.cli.load import check_length, read_config
    from specdec_hf.model_files import load_model, load_tokenizer
    from specdec_hf.runner.protocol import vocab_size_of

    from specdec_lab.training.model_card import collect_report, write_report
    from specdec_lab.training.pipeline import Pipeline, check_begun, check_source
    from specdec_lab.training.texts import check_prompts

    if threads is not None:
        torch.set_num_threads(threads)
    placed = find_device(device)
    try:
        for folder in folders:
            check_begun(folder, settings)
        if reuse is not None:
            check_source(reuse, settings)
        check_prompts(prompts)
    except ValueError as error:
        fail(str(error))
    with _progress() as progress:
        progress.stage("loading", 1)
        path, config = read_config(source, lambda text: progress.stage(text, 1))
        check_length(settings.length, config)
        whole, hidden = vocab_size_of(config), config.get_text_config(decoder=True).hidden_size
        if settings.head == DRAFT_MODEL and settings.width > hidden:
            fail(f"--width must be at most {hidden}, that of {source.title}, got {settings.width}")
        if draft_vocab_size is not None and draft_vocab_size > whole:
            fail(
                f"--draft-vocab-size must be at most {whole}, the vocabulary of {source.title}, "
                f"got {draft_vocab_size}"
            )
        tokenizer = load_tokenizer(path)
        model = load_model(path, device=placed, dtype=getattr(torch, dtype))
        picture = importlib.util.find_spec("matplotlib") is not None
        reports, earlier = [], list[Any]()
        for number, folder in enumerate(folders):
            progress.name = f" of draft model {number + 1}" if len(folders) > 1 else ""
            try:
                pipeline = Pipeline(
                    model, tokenizer, folder, settings, progress,
                    _share(minutes, number, len(folders)),
                    source=folders[0] if number and reuse is None else reuse, earlier=earlier,
                    resume=resume,
                )  # fmt: skip
                head = pipeline.run(prompts, texts)
            except ValueError as error:
                fail(str(error))
            except FloatingPointError as error:
                fail(
                    f"{error}; try --learning-rate below {settings.learning_rate:g}"
                    + ("" if dtype == "float32" else f" or another --dtype than {dtype}")
                    + f" with another --output, and --reuse {folder} for the same texts",
                    FAILED,
                )
            report = collect_report(
                pipeline, head, target=source.title, licence=_licence(source), command=_command(),
                data=_data(prompts, texts, reuse, openings=settings.openings), resumed=resume,
            )  # fmt: skip
            write_report(folder, report, picture=picture)
            reports.append(report)
            if folder != folders[-1]:  # as it will draft
                earlier.append(load_model(folder, device=placed, dtype=model.dtype))
    for folder, report in zip(folders, reports, strict=True):
        _print(folder, report, picture=picture)


def _share(minutes: float | None, number: int, count: int) -> float | None:
    """The minutes of one of several drafters; the first writes the texts, too."""
    return None if minutes is None else minutes / (count + 1) * (1 if number else 2)


def _licence(source: Source) -> str:
    return f"{LICENCE} as {EMBEDDED_NAME}" if source.kind == "embedded" else "other (the target's)"


def _data(prompts: list[str], texts: list[str], reuse: Path | None, *, openings: float) -> str:
    """Where the texts come from, for the model card."""
    if reuse is not None:
        return f"those of the run in {reuse.name}"
    if texts:
        return (
            "those that were given, in pieces; of 20 texts or more every 20th takes no part in "
            "training, of fewer the last 20th of each"
        )
    if prompts:
        return "prompts that were given, and the target's answers"
    opened = f", {openings:.0%} of them after given first words" if openings else ""
    return (
        f"the target writes users' turns after the header of its chat template{opened}, and "
        "answers them; no prompt of a benchmark takes part"
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
    if report["covered"] is not None:
        console.print(f"with the draft models before it: {report['covered']:.3f} greedy")
    what = "the draft model" if report["settings"]["head"] == DRAFT_MODEL else "the head"
    console.print(visible(f"wrote {what} to {output}"), style="dim")


@contextmanager
def _progress() -> Iterator[Any]:
    """The bar of each stage, on standard error where that is a terminal; else a line for each."""
    from specdec_lab.training.pipeline import Progress as Told

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    note = TextColumn("{task.fields[note]}", markup=False)
    shown = bar(*columns, note, TimeElapsedColumn(), TimeRemainingColumn())

    class Shown(Told):
        name = ""  # of what is trained

        def stage(self, text: str, total: int) -> None:
            text += self.name
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
