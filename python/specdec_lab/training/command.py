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
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from specdec_hf.cli.devices import find_device
from specdec_hf.cli.prompts import read_prompts
from specdec_hf.cli.sources import EMBEDDED_NAME, Source, find_model
from specdec_hf.cli.terminal import FAILED, bar, console, errors, fail, visible

from specdec_lab.training.options import TrainOptions, takes_options
from specdec_lab.training.settings import DRAFT_MODEL, RUN, WORK

if TYPE_CHECKING:
    from specdec_hf.heads.base import Head

    from specdec_lab.training.pipeline import Pipeline

LICENCE = "Apache-2.0"  # of the embedded model


@takes_options
def train_command(asked: TrainOptions) -> None:
    """Train a head for --drafter HEAD:FOLDER, or a draft model for --drafter FOLDER.

    The model writes a user's turn after the header of its chat template and answers it; the drafter
    learns the model's probabilities over these texts.
    """
    asked.check()
    source = find_model("--model", asked.model)
    for folder in dict.fromkeys([asked.output, *asked.folders]):
        _check_is_own(folder, source, asked.folders)
    prompts = [] if asked.prompts is None else [x.turns[0] for x in read_prompts(asked.prompts)]
    _run(asked, source, prompts, [_read_text(file) for file in asked.texts or ()])


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


def _run(asked: TrainOptions, source: Source, prompts: list[str], texts: list[str]) -> None:
    """Train a drafter in each folder; the later ones learn what those before them miss."""
    import torch
    from specdec_hf.model_files import load_model

    from specdec_lab.training.model_card import collect_report, write_report

    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    placed, folders = find_device(asked.device), asked.folders
    _check_earlier_runs(asked, prompts)
    with _progress() as progress:
        progress.stage("loading", 1)
        model, tokenizer = _load_target(asked, source, placed, progress)
        picture = importlib.util.find_spec("matplotlib") is not None
        reports, earlier = [], list[Any]()
        for number, folder in enumerate(folders):
            progress.name = f" of draft model {number + 1}" if len(folders) > 1 else ""
            pipeline, head = _train(
                asked, model, tokenizer, number, earlier, progress, prompts, texts
            )
            report = collect_report(
                pipeline, head, target=source.title, licence=_licence(source), command=_command(),
                data=_data(prompts, texts, asked.reuse, openings=asked.openings),
                resumed=asked.resume,
            )  # fmt: skip
            write_report(folder, report, picture=picture)
            reports.append(report)
            if folder != folders[-1]:  # as it will draft
                earlier.append(load_model(folder, device=placed, dtype=model.dtype))
    for folder, report in zip(folders, reports, strict=True):
        _print(folder, report, picture=picture)


def _check_earlier_runs(asked: TrainOptions, prompts: list[str]) -> None:
    """Refuse folders whose runs had other settings, and prompts that cannot be held out."""
    from specdec_lab.training.pipeline import check_begun, check_source
    from specdec_lab.training.texts import check_prompts

    try:
        for folder in asked.folders:
            check_begun(folder, asked.settings)
        if asked.reuse is not None:
            check_source(asked.reuse, asked.settings)
        check_prompts(prompts)
    except ValueError as error:
        fail(str(error))


def _load_target(
    asked: TrainOptions, source: Source, device: str, progress: Any
) -> tuple[Any, Any]:
    """The target and its tokenizer; sizes that do not fit it are refused before it is read."""
    import torch
    from specdec_hf.cli.load import check_length, read_config
    from specdec_hf.model_files import load_model, load_tokenizer
    from specdec_hf.runner.protocol import vocab_size_of

    path, config = read_config(source, lambda text: progress.stage(text, 1))
    check_length(asked.length, config)
    whole, hidden = vocab_size_of(config), config.get_text_config(decoder=True).hidden_size
    width, size = asked.settings.width, asked.draft_vocab_size
    if asked.draft_model and width > hidden:
        fail(f"--width must be at most {hidden}, that of {source.title}, got {width}")
    if size is not None and size > whole:
        fail(
            f"--draft-vocab-size must be at most {whole}, the vocabulary of {source.title}, "
            f"got {size}"
        )
    tokenizer = load_tokenizer(path)
    return load_model(path, device=device, dtype=getattr(torch, asked.dtype)), tokenizer


def _train(
    asked: TrainOptions, model: Any, tokenizer: Any, number: int, earlier: list[Any], progress: Any,
    prompts: list[str], texts: list[str],
) -> tuple[Pipeline, Head]:  # fmt: skip
    """One of the drafters, which learns what the earlier ones miss."""
    from specdec_lab.training.pipeline import Pipeline

    folders = asked.folders
    folder, minutes = folders[number], _share(asked.minutes, number, len(folders))
    source = folders[0] if number and asked.reuse is None else asked.reuse
    try:
        pipeline = Pipeline(
            model, tokenizer, folder, asked.settings, progress, minutes, source=source,
            earlier=earlier, resume=asked.resume,
        )  # fmt: skip
        return pipeline, pipeline.run(prompts, texts)
    except ValueError as error:
        fail(str(error))
    except FloatingPointError as error:
        fail(
            f"{error}; try --learning-rate below {asked.learning_rate:g}"
            + ("" if asked.dtype == "float32" else f" or another --dtype than {asked.dtype}")
            + f" with another --output, and --reuse {folder} for the same texts",
            FAILED,
        )


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
