"""Where a model's files are: a folder in the Hugging Face layout, or one GGUF file.

This module does without torch, because the command line finds models before it loads torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

WEIGHTS = ("*.safetensors", "*.bin")
GGUF_MAGIC = b"GGUF"


class MissingModelError(RuntimeError):
    """A model cannot be found or read."""


def model_path(name: str | os.PathLike[str]) -> Path | None:
    """The model folder or GGUF file at a path, in which ~ is the home folder; None without one.

    Raises:
        ValueError: a folder without a model, a file of another kind, or one that cannot be read.
    """
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, an unknown home
        return None
    if os.fspath(name) and is_folder:
        check_model_folder(f"folder {os.fspath(name)}", path)
        return path
    if is_file:
        _check_gguf(path)
        return path
    return None


def check_model_folder(what: str, path: Path) -> None:
    """Raise ValueError for a folder without a config.json or without weights."""
    if not (path / "config.json").is_file():
        hint = "; name the GGUF file in it" if any(path.glob("*.gguf")) else ""
        raise ValueError(f"{what} holds no model: config.json is missing{hint}")
    if not any(file for pattern in WEIGHTS for file in path.glob(pattern)):
        raise ValueError(f"{what} holds no weights ({' or '.join(WEIGHTS)})")


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            begin = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    if begin != GGUF_MAGIC:
        raise ValueError(f"{path} is no GGUF file: it begins with {begin!r}, not {GGUF_MAGIC!r}")


def state_of_files(path: Path) -> tuple[Any, ...]:
    """What is another one where a file, or one in a folder, was written again."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple((file.name, (s := file.stat()).st_mtime_ns, s.st_size) for file in files)
