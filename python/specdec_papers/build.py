"""The ``build`` commands: files that drafters read, made from text."""

# ruff: noqa: PLC0415  # torch and Transformers load at first use; see app.py
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from specdec_hf.cli import options
from specdec_hf.cli.options import at_least, must_be, option
from specdec_hf.cli.paths import check_output, check_readable
from specdec_hf.cli.sources import Source, find_model
from specdec_hf.cli.terminal import bar, console, fail

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE = 2**20  # characters that are tokenized at once

Files = Annotated[list[Path], typer.Argument(metavar="FILES...", help="Text files in UTF-8.")]
Output = Annotated[Path, option("--output FILE", "The file to write.")]


def build_ngram(
    files: Files,
    output: Output,
    model: options.ModelName = "embedded",
    order: Annotated[
        int,
        option(
            "--order N",
            "Tokens of the longest n-grams, 1 to 8.",
            must_be("in [1, 8]", lambda order: 1 <= order <= 8),
        ),
    ] = 3,
    min_count: Annotated[int, option("--min-count N", "Leave out rarer n-grams.", at_least(1))] = 1,
) -> None:
    """Count the n-grams of texts, for --drafter ngram:FILE.

    The model's tokenizer splits the texts; the drafter then fits models with that tokenizer.
    """
    texts, tokenizer, vocab_size = read_texts(files, output, model)
    from specdec_hf.drafters.fingerprint import fingerprint_of

    from specdec_papers.ngram_table import NgramTable

    table = NgramTable.build(
        texts, vocab_size, order, min_count, fingerprint=fingerprint_of(tokenizer)
    )
    if not len(table.tokens[0]):
        most = np.unique(np.concatenate(texts), return_counts=True)[1].max()
        fail(f"--min-count must be at most {most}, as often as any token occurs, got {min_count}")
    table.save(output)
    sizes = ", ".join(f"{len(level):,} {k}-grams" for k, level in enumerate(table.tokens, start=1))
    console.print(f"{output}: {sizes} of {sum(map(len, texts)):,} tokens")


def build_rest(files: Files, output: Output, model: options.ModelName = "embedded") -> None:
    """Sort the text of a datastore, for --drafter rest:FILE and suffix_automaton:FILE.

    The model's tokenizer splits the texts; the drafters then fit models with that tokenizer.
    """
    texts, tokenizer, vocab_size = read_texts(files, output, model)
    from specdec_hf.drafters.fingerprint import fingerprint_of
    from specdec_host import Corpus

    # No match should go from one file to the next.
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens = np.concatenate([part for text in texts for part in (text, between)]).astype(np.int64)
    with progress_bar() as progress:
        task = progress.add_task("sorting", total=tokens.nbytes)
        corpus = Corpus(
            tokens,
            progress=lambda part: progress.update(task, completed=int(part * tokens.nbytes)),
        )
        progress.update(task, description="writing")
        corpus.save(output, vocab_size=vocab_size, fingerprint=fingerprint_of(tokenizer))
    console.print(f"{output}: {len(tokens):,} tokens, {output.stat().st_size:,} bytes")


def read_texts(
    files: list[Path], output: Path, model: str
) -> tuple[list[NDArray[np.int64]], Any, int]:
    """The tokens of each file, and a model's tokenizer and vocabulary size.

    It exits with one line on faults.

    Args:
        files: text files; another file may not be the output.
        output: the file that will be written.
        model: as for ``--model``; only its configuration and tokenizer are read.
    """
    for file in files:
        check_readable("FILES", file)
    check_output("--output", output, files)
    source = find_model("--model", model)
    texts = []
    with progress_bar() as progress:
        task = progress.add_task("reading the tokenizer", total=None)
        tokenizer, vocab_size = _tokenizer(source)
        total = sum(file.stat().st_size for file in files)
        progress.update(task, description="reading", total=total)
        for file in files:
            ids: list[int] = []
            for piece in _pieces(file):
                ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
                progress.advance(task, len(piece.encode()))
            texts.append(np.array(ids, dtype=np.int64))
    if not any(map(len, texts)):
        fail(f"FILES hold no text: {', '.join(map(str, files))}")
    return texts, tokenizer, vocab_size


def progress_bar() -> Progress:
    """Bytes done and time left, on standard error where that is a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    return bar(*columns, TimeRemainingColumn())


def _tokenizer(source: Source) -> tuple[Any, int]:
    from specdec_hf.cli.weights import embedded_folder
    from specdec_hf.model_files import load_config, load_tokenizer
    from specdec_hf.runner.protocol import vocab_size_of

    path = embedded_folder() if source.kind == "embedded" else source.path
    return load_tokenizer(path), vocab_size_of(load_config(path))


def _pieces(file: Path) -> Iterator[str]:
    """A text in pieces that end with a line."""
    try:
        with file.open(encoding="utf-8") as lines:
            while piece := "".join(lines.readlines(PIECE)):
                yield piece
    except UnicodeDecodeError as error:
        fail(f"FILES: {file} is not valid UTF-8 at byte {error.start}")
    except OSError as error:
        fail(f"FILES: cannot read {file}: {error.strerror}")
