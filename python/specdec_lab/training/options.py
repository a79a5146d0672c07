"""The options of the command ``train``: declared once, and checked with one another."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from specdec_hf.cli import options
from specdec_hf.cli.options import DTYPES, POSITIVE, SEED, SHARE, at_least, must_be, one_of, option
from specdec_hf.cli.paths import check_folder, check_readable
from specdec_hf.cli.terminal import fail

from specdec_lab.training.settings import (
    DRAFT_MODEL,
    LARGEST_LEARNING_RATE,
    LOSSES,
    TrainingSettings,
)

HEADS = ("eagle3", "medusa", "blockwise", "exit_head", "pass_head")
WHOLE_VOCABULARY = ("exit_head", "pass_head")  # what these draft


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the command ``train`` is asked for."""

    output: Annotated[
        Path,
        option(
            "--output FOLDER",
            "Write head or draft model here. A run that was interrupted goes on here.",
        ),
    ]
    head: Annotated[str, option("--head HEAD", f"{', '.join(HEADS)}.", one_of(*HEADS))] = (
        TrainingSettings.head
    )
    model: options.ModelName = "embedded"
    prompts: Annotated[
        str | None,
        option(
            "--prompts FILE",
            'Prompts to answer, as JSON lines with "turns"; without, the model writes them.',
        ),
    ] = None
    openings: Annotated[
        float,
        option(
            "--openings X",
            "Share of the users' turns whose first words are given, such as those of a question.",
            SHARE,
        ),
    ] = TrainingSettings.openings
    texts: Annotated[
        list[Path] | None, option("--texts FILE", "Train on these texts. May be repeated.")
    ] = None
    tokens: Annotated[int, option("--tokens N", "Tokens of all texts.", at_least(1))] = (
        TrainingSettings.tokens
    )
    minutes: Annotated[
        float | None, option("--minutes X", "Bound on the time of the whole.", POSITIVE)
    ] = None
    length: Annotated[int, option("--length N", "Most tokens of a text.", at_least(8))] = (
        TrainingSettings.length
    )
    turn_length: Annotated[
        int | None,
        option(
            "--turn-length N",
            "Most tokens of a user's turn that the model writes.  [default: a quarter of --length]",
            at_least(1),
        ),
    ] = None
    rows: Annotated[
        int, option("--rows N", "Texts that are written at the same time.", at_least(1))
    ] = TrainingSettings.rows
    batch_size: Annotated[
        int, option("--batch-size N", "Texts of a training step.", at_least(1))
    ] = TrainingSettings.batch_size
    steps: Annotated[
        int | None,
        option("--steps N", "Training steps.  [default: all texts four times]", at_least(1)),
    ] = None
    draft_steps: Annotated[
        int | None,
        option(
            "--draft-steps N",
            "Drafts of one round that are learnt, or heads or look-ahead embeddings.  "
            f"[default: {TrainingSettings.draft_steps}]",
            at_least(1),
            must_be("at most 1023", lambda steps: steps < 1024),  # a round drafts 1024 at most
        ),
    ] = None
    learning_rate: Annotated[
        float,
        option(
            "--learning-rate X",
            "The largest one of the schedule.",
            POSITIVE,
            must_be(f"at most {LARGEST_LEARNING_RATE:g}", lambda x: x <= LARGEST_LEARNING_RATE),
        ),
    ] = TrainingSettings.learning_rate
    draft_vocab_size: Annotated[
        int | None,
        option(
            "--draft-vocab-size N",
            f"Tokens that a head can draft.  [default: {TrainingSettings.draft_vocab_size}]",
            at_least(1),
        ),
    ] = None
    layer: Annotated[
        int | None,
        option("--layer N", "Layers before an early exit.  [default: a third of all]", at_least(1)),
    ] = None
    draft_model: Annotated[
        bool, option("--draft-model", "Train a small Llama in the place of a head.")
    ] = False
    width: Annotated[
        int | None,
        option(
            "--width N",
            f"Of a draft model, a multiple of 32.  [default: {TrainingSettings.width}]",
            at_least(32),
            must_be("a multiple of 32", lambda width: width % 32 == 0),
        ),
    ] = None
    num_layers: Annotated[
        int | None,
        option(
            "--num-layers N",
            f"Of a draft model.  [default: {TrainingSettings.num_layers}]",
            at_least(1),
        ),
    ] = None
    loss: Annotated[
        str,
        option(
            "--loss LOSS",
            f"{', '.join(LOSSES)}. The first half of the steps has the first.",
            one_of(*LOSSES),
        ),
    ] = TrainingSettings.loss
    on_policy: Annotated[
        float | None,
        option(
            "--on-policy X",
            "Share of the steps whose answers a draft model writes itself.  [default: 0]",
            SHARE,
        ),
    ] = None
    num_drafters: Annotated[
        int | None,
        option(
            "--num-drafters N",
            "Draft models for one tree, each trained on what those before it miss. They go to "
            "folders 1, 2, ... of --output.  [default: 1, in --output itself]",
            at_least(1),
            must_be("at most 1024", lambda number: number <= 1024),  # nodes of a tree
        ),
    ] = None
    reuse: Annotated[
        Path | None,
        option("--reuse FOLDER", "Train on the texts and states of the run in this folder."),
    ] = None
    resume: Annotated[
        Path | None,
        option("--resume FOLDER", "Begin with the weights of the EAGLE-3 head in FOLDER."),
    ] = None
    seed: Annotated[int, option("--seed N", "Of texts and training.", SEED)] = TrainingSettings.seed
    dtype: Annotated[
        str,
        option(
            "--dtype DTYPE",
            "Of the target, and of matrix products in training: float32, bfloat16 or float16.",
            one_of(*DTYPES[:3]),
        ),
    ] = "bfloat16"
    device: options.Device = None
    threads: Annotated[
        int | None,
        option(
            "--threads N",
            "CPU threads.  [default: torch's]",
            at_least(1),
            must_be("at most 1024", lambda number: number <= 1024),  # more take minutes to begin
        ),
    ] = None

    @property
    def kind(self) -> str:
        """The kind of what is trained, one of `KINDS`."""
        return DRAFT_MODEL if self.draft_model else self.head

    @property
    def folders(self) -> list[Path]:
        """The folder of each drafter."""
        if self.num_drafters is None or self.num_drafters == 1:
            return [self.output]
        return [self.output / str(number) for number in range(1, self.num_drafters + 1)]

    @property
    def settings(self) -> TrainingSettings:
        """The settings of the training; those that are not given have its defaults."""
        given = {name: getattr(self, name) for name in DECLARED if getattr(self, name) is not None}
        turn_length = self.turn_length or max(1, self.length // 4)
        return TrainingSettings(**{**given, "head": self.kind, "turn_length": turn_length})

    def check(self) -> None:
        """Refuse options that do not fit one another, and files that cannot be read."""
        self._check_kind()
        if self.draft_steps is not None and self.draft_steps >= self.length:
            fail(f"--draft-steps must be below --length, {self.length}, got {self.draft_steps}")
        if self.resume is not None:
            if self.kind != "eagle3":
                fail(f"--resume needs --head eagle3, got {self.kind}")
            check_readable("--resume", self.resume / "config.json")
            if self.resume.resolve() == self.output.resolve():
                fail(f"--resume must be another folder than --output, got {self.resume}")
        self._check_texts()
        for file in self.texts or ():
            check_readable("--texts", file)
        check_folder("--output", self.output)

    def _check_kind(self) -> None:
        """Refuse options that are for other kinds of drafters."""
        size = self.draft_vocab_size
        if self.draft_model:
            if self.head != TrainingSettings.head:
                fail("give either --draft-model or --head HEAD, not both")
            if size is not None:
                fail(
                    "--draft-vocab-size needs a head: a draft model drafts the whole vocabulary, "
                    f"got {size}"
                )
        else:
            for name in ("width", "num_layers", "on_policy", "num_drafters"):
                if getattr(self, name) is not None:
                    option = f"--{name.replace('_', '-')}"
                    fail(f"{option} needs --draft-model, got --head {self.head}")
        if size is not None and self.kind in WHOLE_VOCABULARY:
            fail(
                "--draft-vocab-size needs a head that drafts a part of the vocabulary, got "
                f"{self.kind} and {size}"
            )
        if self.layer is not None and self.kind != "exit_head":
            fail(f"--layer needs --head exit_head, got {self.kind}")
        if self.draft_steps is not None and self.kind in (DRAFT_MODEL, "exit_head"):
            fail(f"--draft-steps needs a head that reads its own drafts or none, got {self.kind}")

    def _check_texts(self) -> None:
        """Refuse more than one source of texts, and what a given one leaves no place for."""
        sources = {"--prompts": self.prompts, "--texts": self.texts, "--reuse": self.reuse}
        others = [name for name, other in sources.items() if other]
        for name, given in (("--openings", self.openings), ("--turn-length", self.turn_length)):
            if given and others:
                fail(f"{name} needs turns that the model writes, and {others[0]} is given")
        half = self.length // 2  # the other half is for the answer
        if self.turn_length is not None and self.turn_length > half:
            fail(f"--turn-length must be at most half of --length, {half}, got {self.turn_length}")
        if len(others) > 1:
            fail("give one of --prompts FILE, --texts FILE and --reuse FOLDER")


# The options that are settings as they are given.
_SETTINGS = {one.name for one in fields(TrainingSettings)}
DECLARED = [one.name for one in fields(TrainOptions) if one.name in _SETTINGS]


def takes_options(command: Callable[[TrainOptions], None]) -> Callable[..., None]:
    """Give a command an option for each of `TrainOptions`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        command(TrainOptions(**given))

    hints = get_type_hints(TrainOptions, globals(), include_extras=True)  # lambdas read globals
    wrapped.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name],
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in fields(TrainOptions)
    ])  # fmt: skip
    return wrapped
