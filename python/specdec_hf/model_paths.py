"""Where a model's files are: a folder in the Hugging Face layout, or one GGUF file.

This module does without torch, because the command line finds models before it loads torch.
"""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

WEIGHTS = ("*.safetensors", "*.bin")
GGUF_MAGIC = b"GGUF"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_GGUF_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # for struct, by type
_GGUF_STRING = 8


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


def num_layers(path: Path) -> int | None:
    """How many layers a model has, from its config.json or the head of its GGUF file, or None."""
    try:
        if path.is_file():
            return _block_count(path)
        given = json.loads((path / "config.json").read_text(encoding="utf-8"))
        for part in (given, given.get("text_config") or {}):  # a model of images has its text's
            found = part.get("num_hidden_layers", part.get("n_layer"))
            if type(found) is int:
                return found
    except (OSError, ValueError, AttributeError, struct.error):  # what loads the model will say it
        pass
    return None


def _block_count(path: Path) -> int | None:
    """The number of layers in the metadata of a GGUF file, whose entries are read up to it."""
    with path.open("rb") as file:

        def read(form: str) -> Any:
            return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]

        def value(kind: int) -> Any:
            if kind in _GGUF_NUMBERS:
                return read(_GGUF_NUMBERS[kind])
            if kind == _GGUF_STRING:
                return file.read(read("Q"))
            inner, count = read("I"), read("Q")  # an array
            return [value(inner) for _ in range(count)]

        _, version, _, count = file.read(4), read("I"), read("Q"), read("Q")
        for _ in range(count if version in (2, 3) else 0):
            name, found = file.read(read("Q")), value(read("I"))
            if name.endswith(b".block_count") and type(found) is int:
                return found
    return None


def state_of_files(path: Path) -> tuple[Any, ...]:
    """What is another one where a file, or one in a folder, was written again.

    Raises:
        OSError: a file that cannot be looked at, such as a link to nothing.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple((file.name, (s := file.stat()).st_mtime_ns, s.st_size) for file in files)
