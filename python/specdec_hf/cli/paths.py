"""Files and folders that the command line refuses to read or to write."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specdec_hf.cli.terminal import fail


@contextmanager
def naming(option: str, doing: str, path: Path) -> Iterator[None]:
    """Errors of the file system end the command with one line, which names option and path."""
    try:
        yield
    except (OSError, ValueError) as error:
        fail(f"{option}: cannot {doing} {path}: {getattr(error, 'strerror', None) or error}")


def check_readable(option: str, path: Path) -> None:
    """Refuse a file that cannot be read."""
    with naming(option, "read", path):
        path.open("rb").close()


def check_is_folder(option: str, path: Path) -> None:
    """Refuse a folder that does not exist, and a file in its place."""
    with naming(option, "read", path):
        if path.is_file():
            fail(f"{option} must name a folder, {path} is a file")
        if not path.is_dir():
            fail(f"{option}: folder {path} does not exist")


def check_json(path: Path | None, prompts: str | None = None) -> None:
    """Refuse a report that cannot be written, and the prompt file."""
    if path is not None:
        check_output("--json", path, [] if prompts is None else [Path(prompts)])


def check_output(option: str, path: Path, inputs: Sequence[Path] = ()) -> None:
    """Refuse a path that cannot be written, and one of the files that are read."""
    if str(path) == "-":
        fail(f"{option} must name a file, got -")
    with naming(option, "write", path):
        if path.is_dir():
            fail(f"{option} must name a file, {path} is a folder")
        if not path.absolute().parent.is_dir():
            fail(f"{option}: folder {path.parent} does not exist")
        existed = path.exists()
        for read in inputs:
            if existed and read.exists() and path.samefile(read):
                fail(f"{option} would overwrite the input file {read}")
        path.open("ab").close()
        if not existed:
            path.unlink()


def check_folder(option: str, path: Path) -> None:
    """Refuse a folder that cannot be written; one that is missing must have its parent."""
    with naming(option, "write", path):
        if path.exists() and not path.is_dir():
            fail(f"{option} must name a folder, {path} is a file")
        if not path.exists():
            if not path.absolute().parent.is_dir():
                fail(f"{option}: folder {path.parent} does not exist")
            path.mkdir()
            path.rmdir()
        else:
            tempfile.TemporaryFile(dir=path).close()
