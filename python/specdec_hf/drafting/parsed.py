"""What a user calls a drafter, such as ``layers:4,temperature=0.5``, in its parts.

This module does without torch, as the command line does where it checks ``--drafter``.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from specdec_hf.arguments import PARAMETERS, read_number, split_options
from specdec_hf.drafting.entry import FILE, FOLDER, DrafterEntry
from specdec_hf.drafting.registry import drafters, entry_called, entry_for, entry_named

# The other values that a drafter may take in the place of a file.
_NO_FILES = {"N": r"\d+", "A-B": r"\d{1,4}-\d{1,4}"}
# Sampling parameters of a draft model, which the command line takes after its name.
SAMPLING = tuple(PARAMETERS)


def sampling_of(options: Mapping[str, str]) -> dict[str, float]:
    """The numbers of options that are sampling parameters.

    Raises:
        ValueError: a text that is no number, by name.
    """
    return {
        name: read_number(name, "a drafter", value, integer=name == "top_k")
        for name, value in options.items()
    }


class ParsedDrafter(NamedTuple):
    """What a user calls a drafter, such as ``layers:4,temperature=0.5``, in its parts.

    Attributes:
        entry: None for a model.
        value: what follows the name, or the name of a model.
        options: the texts after that, by name.
        reads: `FILE` or `FOLDER` where the value is one; empty for other values, and for models.
    """

    entry: DrafterEntry | None
    value: str
    options: dict[str, str]
    reads: str

    @property
    def reads_file(self) -> bool:
        return self.reads == FILE

    @property
    def reads_folder(self) -> bool:
        return self.reads == FOLDER

    @property
    def path(self) -> str:
        """The value, in which ~ is the home folder."""
        return os.path.expanduser(self.value)

    def check_file(self) -> None:
        """Raise ValueError for a file of another kind, where that needs no torch."""
        if self.entry is not None and self.reads == FILE and self.entry.check_file:
            pkgutil.resolve_name(self.entry.check_file)(self.path)


def parse_drafter(text: str) -> ParsedDrafter:
    """The parts of a drafter's text; raises ValueError for an option that is there twice."""
    name, _, rest = text.partition(":")
    entry = entry_called(name)
    if entry is None:
        return ParsedDrafter(None, *split_options(text, SAMPLING), "")
    value, options = split_options(rest, entry.options)
    reads = FOLDER if FOLDER in entry.value.split("|") else FILE if names_file(name, value) else ""
    return ParsedDrafter(entry, value, options, reads if value else "")


def with_name_of_head(text: str) -> str:
    """A drafter's text; the folder of a head gets its drafter's name, as in ``eagle3:FOLDER``."""
    if entry_named(text) is not None:
        return text
    try:
        given = json.loads(Path(text, "config.json").expanduser().read_text(encoding="utf-8"))
        names = [given.get("speculators_model_type"), *(given.get("architectures") or ()), *given]
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):  # no folder, no object
        return text
    marked = (name for name, entry in drafters().items() if any(x in names for x in entry.marks))
    name = next(marked, None)
    return text if name is None else f"{name}:{text}"


def names_file(name: str, value: str) -> bool:
    """Whether the text after the colon of drafter ``name`` is a file, not another of its values.

    >>> names_file("layer_skip", "4-9"), names_file("layer_skip", "4-9.json")
    (False, True)
    """
    kinds = entry_for(name).value.split("|")
    others = (_NO_FILES[kind] for kind in kinds if kind in _NO_FILES)
    return bool(value) and FILE in kinds and not any(re.fullmatch(x, value) for x in others)
