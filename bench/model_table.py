"""Compares text of the loop with plain generation over all model classes of Transformers.

    python -m bench.model_table [--only PATTERN] [--processes N] [--json FILE] [--write FILE]

Every class that generates text is built tiny and random, without a download, and continues prompts
by 16 tokens, greedily, in float32: without drafts, with drafts of which every third is wrong, with
a tree of them, through ``custom_generate`` and with ``return_dict_in_generate``; one prompt and a
left-padded batch; multimodal classes also on random images or sounds.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import re
import signal
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from transformers.models.auto import modeling_auto

from bench.tiny_models.build import build
from bench.tiny_models.compare import LENGTHS, NEW, Outcome, compare, plain, prompts
from bench.tiny_models.families import NOT_BUILT, OTHERS
from bench.tiny_models.inputs import own_inputs

TABLES = (
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ",
)  # fmt: skip
WAYS = ("none", "draft", "tree", "custom", "dict")
RUNS = ("text, one", "text, batch", "own, one", "own, batch")
SIGNS = {"equal": "=", "refused": "r", "WRONG": "W", "CRASH": "X", "plain fails": "p"}
SECONDS = 120  # of one class, after which it counts as a crash
ORDER = (
    "WRONG", "CRASH", "equal", "equal, without drafts", "refused", "plain generation fails",
    "not built",
)  # fmt: skip
HEAD = """# Model classes

Made by `python -m bench.model_table` with {versions},
for all {number} classes that generate text. Tiny random models in float32 continue prompts by 16
tokens, greedily, and the text of the loop is compared with that of `model.generate`."""
LEGEND = """A class is *equal* if no call gave other tokens or an error from inside the model, and a
call with drafts on one prompt gave the tokens of plain generation. What a model does not allow is
refused by name. *Equal, without drafts*: it decodes plainly, and refuses named drafters.

Each column has five signs: for `drafter=None`, for drafts of which every third token is wrong, for
a tree of such drafts, for `custom_generate` first without and then with drafts, and for drafts with
`return_dict_in_generate`. `=` is equal, `r` refused, `W` other tokens, `X` an error from inside the
model, and `p` says that plain generation raises too. *One* is one prompt, *batch* are three of
different lengths, padded on the left; *own* adds random images or sounds."""
DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
console = Console(highlight=False, width=140)


class _TooLong(BaseException):
    """Not an `Exception`, so that no handler on the way takes it for a fault of a call."""


@dataclass
class Row:
    """The outcomes of one class.

    Attributes:
        outcomes: run ("text, one", ...) -> way of calling -> outcome.
        repeats: whether plain generation only repeats one token.
        note: why outcomes, or those on own inputs, are missing.
    """

    name: str
    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    repeats: bool = False
    note: str = ""

    @property
    def status(self) -> str:
        """The worst of the outcomes; "equal" needs equal text of a drafted call on one prompt."""
        found = {o.status for ways in self.outcomes.values() for o in ways.values()}
        for worst in ("WRONG", "CRASH"):
            if worst in found:
                return worst
        if not found:
            return "not built"
        single = [self.outcomes[run] for run in ("text, one", "own, one") if run in self.outcomes]
        if any(ways["draft"].status == "equal" for ways in single if "draft" in ways):
            return "equal"
        if "equal" in found:
            return "equal, without drafts"
        return "refused" if "refused" in found else "plain generation fails"

    @property
    def reason(self) -> str:
        """The message of the first call that was not equal, without the place it came from."""
        # Plain failures of one run do not explain a class that is equal.
        shown = ("WRONG", "CRASH", "refused", "plain fails")
        for status in shown[:3] if self.status == "equal" else shown:
            for run, ways in self.outcomes.items():
                for way, outcome in ways.items():
                    if outcome.status == status:
                        where = "" if status == "refused" else f"{run}, {way}: "
                        return where + outcome.detail
        return self.note


def generating_classes() -> list[str]:
    """Names of all classes that generate text, of the installed Transformers."""
    names = set(OTHERS)
    for table in TABLES:
        for value in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values():
            names.update(value if isinstance(value, tuple) else (value,))
    return sorted(names)


def check(name: str) -> Row:
    """Build a class and run everything on it, within a time limit."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    row = Row(name)

    def stop(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a model that prints would tear the table
            _run(row)
    except _TooLong:
        row.outcomes["time"] = {"all": Outcome("CRASH", f"took longer than {SECONDS} seconds")}
    finally:
        signal.alarm(0)
    return row


def _run(row: Row) -> None:
    if row.name in NOT_BUILT:
        row.note = NOT_BUILT[row.name]
        return
    try:
        model = build(row.name)
    except Exception as error:
        row.note = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return
    one, batch = prompts(LENGTHS[:1]), prompts(LENGTHS)
    row.outcomes["text, one"] = dict(compare(model, one, WAYS))
    row.outcomes["text, batch"] = dict(compare(model, batch, WAYS))
    try:
        own = own_inputs(model, LENGTHS[:1])
    except ValueError as error:
        row.note, own = str(error), None
    if own is not None:
        row.outcomes["own, one"] = dict(compare(model, own, WAYS))
        both = own_inputs(model, LENGTHS)
        assert both is not None
        row.outcomes["own, batch"] = dict(compare(model, both, WAYS))
    try:
        text = plain(model, one)[0, -NEW:]
        row.repeats = len(text.unique()) == 1
    except Exception:
        row.repeats = False


def markdown(rows: list[Row]) -> str:
    """The document: counts, then one line a class."""
    counts = Counter(row.status for row in rows)
    versions = f"Transformers {transformers.__version__} and torch {torch.__version__}"
    head = HEAD.format(versions=versions.split("+", maxsplit=1)[0], number=len(rows))
    table = "\n".join(f"| {status} | {counts[status]} |" for status in ORDER)
    lines = [head, "", "| outcome | classes |", "|---|---|", table, "", LEGEND, ""]
    lines += [f"| class | outcome | {' | '.join(RUNS)} | reason |", "|---|---|" + "---|" * 5]
    for row in rows:
        cells = " | ".join(_signs(row.outcomes.get(run)) for run in RUNS)
        lines.append(f"| {row.name} | {row.status} | {cells} | {row.reason.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _signs(ways: dict[str, Outcome] | None) -> str:
    return "".join(SIGNS[ways[way].status] for way in ways) if ways else ""


def main(
    only: Annotated[str, typer.Option(help="pattern that class names must contain")] = ".",
    processes: Annotated[int, typer.Option(min=1, help="processes that share the classes")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="write outcomes there")] = None,
    write: Annotated[Path | None, typer.Option(help="write the document there")] = None,
) -> None:
    """Print the table, and write the document when all classes were run."""
    names = [name for name in generating_classes() if re.search(only, name)]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.imap_unordered(check, names)
        rows = list(track(found, "model classes", len(names), console=Console(stderr=True)))
    rows.sort(key=lambda row: row.name)
    for row in rows:
        signs = "  ".join(f"{_signs(row.outcomes.get(run)):5}" for run in RUNS)
        console.print(f"{row.name:50} {row.status:22} {signs}  {row.reason}", markup=False)
    counts = Counter(row.status for row in rows)
    console.print(", ".join(f"{counts[status]} {status}" for status in ORDER if counts[status]))
    repeating = [row.name for row in rows if row.repeats]
    console.print(f"{len(repeating)} classes repeat one token: {', '.join(repeating)}")
    console.print(f"{time.perf_counter() - started:.0f} s")
    if json_file is not None:
        outcomes = [{**asdict(row), "status": row.status} for row in rows]
        json_file.write_text(json.dumps(outcomes, indent=1))
    target = DOCUMENT if only == "." and write is None else write
    if target is not None:
        target.write_text(markdown(rows))


if __name__ == "__main__":
    typer.run(main)
