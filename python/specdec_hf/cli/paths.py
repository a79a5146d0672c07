"""Files and folders that the command line refuses to read or to write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specdec_hf.cli.terminal import fail


def check_readable(option: str, path: Path) -> None:
    """Refuse a file that cannot be read."""
    try:
        path.open("rb").close()
    except (OSError, ValueError) as error:
        fail(f"{option}: cannot read {path}: {getattr(error, 'strerror', None) or error}")


def check_is_folder(option: str, path: Path) -> None:
    """Refuse a folder that does not exist, and a file in its place."""
    try:
        if path.is_file():
            fail(f"{option} must name a folder, {path} is a file")
        if not path.is_dir():
            fail(f"{option}: folder {path} does not exist")
    except (OSError, ValueError) as error:
        fail(f"{option}: cannot read {path}: {getattr(error, 'strerror', None) or error}")


def check_json(path: Path | None, prompts: str | None = None) -> None:
    """Refuse a report that cannot be written, and the prompt file."""
    if path is not None:
        check_output("--json", path, [] if prompts is None else [Path(prompts)])


def check_output(option: str, path: Path, inputs: Sequence[Path] = ()) -> None:
    """Refuse a path that cannot be written, and one of the files that are read."""
    if str(path) == "-":
        fail(f"{option} must name a file, got -")
    try:
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
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fail(f"{option}: cannot write {path}: {reason}")


def check_folder(option: str, path: Path) -> None:
    """Refuse a folder that cannot be written; one that is missing must have its parent."""
    try:
        if path.exists() and not path.is_dir():
            fail(f"{option} must name a folder, {path} is a file")
        folder = path if path.is_dir() else path.absolute().parent
        if not folder.is_dir():
            fail(f"{option}: folder {path.parent} does not exist")
        writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        fail(f"{option}: cannot write {path}: {getattr(error, 'strerror', None) or error}")
    if not writable:
        fail(f"{option}: cannot write {path}: Permission denied")
