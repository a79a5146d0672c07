"""The drafters that have a name, for ``generate(drafter=...)`` and the command line.

This module does without torch, because the command line checks ``--drafter`` before it loads torch.
"""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specdec_hf import plugins
from specdec_hf.arguments import PARAMETERS, naming_errors, read_number, split_options
from specdec_hf.drafting.entry import FILE, FOLDER, Entry, entry_of_head

GROUP = "specdec.drafters"  # of the entry points whose objects are such tables
AUTO = "auto"  # the drafter of a call whose user leaves the choice to the library
# The other values that a drafter may take in the place of a file.
_NO_FILES = {"N": r"\d+", "A-B": r"\d{1,4}-\d{1,4}"}
# Sampling parameters of a draft model, which the command line takes after its name.
SAMPLING = tuple(PARAMETERS)


_OWN: dict[str, Entry] = {
    AUTO: Entry(
        "specdec_hf.heads.auto:AutoDrafter",
        "copies from the text as prompt_lookup and suffix_automaton do, and drafts with the head "
        "that lies in the model's folder specdec_head, or that is shipped for it; all in one tree",
        own_tree=True,
    ),
    "prompt_lookup": Entry(
        "specdec_hf.drafters.copying:PromptLookupDrafter",
        "copies what followed the last tokens where they occurred before",
        several=True,
    ),
    "suffix_automaton": Entry(
        "specdec_hf.drafters.copying:SuffixAutomatonDrafter",
        "copies what most often followed the longest end of the text that occurred before, there "
        "or in the text that FILE was built from, and with keep=64MiB in those of earlier calls",
        value=FILE,
        check_file="specdec_host.corpus_file:map_file",
        options=("keep",),
        reports_confidence=True,
        several=True,
    ),
    "rest": Entry(
        "specdec_hf.drafters.copying:RestDrafter",
        "copies what most often followed the end of the text in the text that FILE was built from",
        value=FILE,
        needs_value=True,
        check_file="specdec_host.corpus_file:map_file",
        reports_confidence=True,
        several=True,
    ),
    "eagle3": entry_of_head(
        "specdec_hf.heads.eagle3.drafter:Eagle3Drafter",
        "trees of an EAGLE-3 head in a folder, which reads the model's hidden states",
        own_tree=True,
        marks=("eagle3", "LlamaForCausalLMEagle3"),
    ),
    "eagle3_chain": entry_of_head(
        "specdec_hf.heads.eagle3.drafter:Eagle3ChainDrafter", "chains of such a head", draws=True
    ),
}


@functools.cache
def drafters() -> dict[str, Entry]:
    """All drafters by name: those of this package, and of the tables of installed packages.

    Raises:
        ImportError: a package whose table cannot be loaded.
        ValueError: a name that two tables have.
    """
    found = dict(_OWN)
    for package in sorted(plugins.entry_points_of(GROUP)):
        for name, entry in plugins.load(package, GROUP).items():
            if name in found:
                raise ValueError(
                    f"drafters must differ in name, got {name!r} for {found[name].place} and, by "
                    f"{package} of {GROUP}, for {entry.place}"
                )
            found[name] = entry
    return found


def entry_called(name: str) -> Entry | None:
    """The entry of a name; the tables of other packages are read where this package lacks it."""
    return _OWN.get(name) or drafters().get(name)


def entry_for(name: str) -> Entry:
    """The entry of the name of a drafter."""
    return _OWN.get(name) or drafters()[name]


def usage(name: str) -> str:
    """A name with its text after the colon, such as ``ngram:FILE``."""
    entry = entry_for(name)
    if not entry.value:
        return name
    options = f"[,{entry.options[0]}=..]" if entry.options else ""
    value = entry.value + options
    return f"{name}:{value}" if entry.needs_value else f"{name}[:{value}]"


def sampling_of(options: Mapping[str, str]) -> dict[str, float]:
    """The numbers of options that are sampling parameters.

    Raises:
        ValueError: a text that is no number, by name.
    """
    return {
        name: read_number(name, "a drafter", value, integer=name == "top_k")
        for name, value in options.items()
    }


def usages() -> str:
    """All names with their texts, for messages."""
    return ", ".join(map(usage, drafters()))


def entry_of(text: str) -> Entry | None:
    """The entry that ``NAME`` or ``NAME:TEXT`` names; None for an unknown name.

    Raises:
        ValueError: a text that the drafter does not take, or none where it needs one.
    """
    name, colon, value = text.partition(":")
    entry = entry_called(name)
    if entry is None:
        return None
    if value and not entry.value:
        raise ValueError(f"drafter {name!r} takes no value, got {text!r}")
    if not value and (colon or entry.needs_value):
        raise ValueError(f"drafter must be {usage(name)}, got {text!r}")
    return entry


def entry_named(text: str) -> Entry | None:
    """The entry of a drafter's text, whose value is not checked; None for those without a name."""
    return entry_called(text.partition(":")[0])


class ParsedDrafter(NamedTuple):
    """What a user calls a drafter, such as ``layers:4,temperature=0.5``, in its parts.

    Attributes:
        entry: None for a model.
        value: what follows the name, or the name of a model.
        options: the texts after that, by name.
        reads: `FILE` or `FOLDER` where the value is one; empty for other values, and for models.
    """

    entry: Entry | None
    value: str
    options: dict[str, str]
    reads: str

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


def value_of(text: str) -> str:
    """The text after the colon of ``NAME:TEXT``; where it may be a file, ~ is the home folder."""
    name, _, value = text.partition(":")
    entry = entry_called(name)
    is_path = entry is not None and (FILE in entry.value or FOLDER in entry.value)
    return os.path.expanduser(value) if is_path else value


def names_file(name: str, value: str) -> bool:
    """Whether the text after the colon of drafter ``name`` is a file, not another of its values.

    >>> names_file("layer_skip", "4-9"), names_file("layer_skip", "4-9.json")
    (False, True)
    """
    kinds = entry_for(name).value.split("|")
    others = (_NO_FILES[kind] for kind in kinds if kind in _NO_FILES)
    return bool(value) and FILE in kinds and not any(re.fullmatch(x, value) for x in others)


def class_of(name: str) -> Any:
    """The class of the drafter ``name``, whose module is imported.

    Raises:
        ImportError: its module, or one that it needs, is not installed.
    """
    place = entry_for(name).place
    try:
        return pkgutil.resolve_name(place)
    except ModuleNotFoundError as error:
        raise ImportError(f"drafter {name!r} at {place}: {error}", name=error.name) from error


def make_drafter(text: str) -> Any:
    """The `Drafter` that ``NAME`` or ``NAME:TEXT`` names; None for an unknown name.

    Raises:
        ValueError: a text that does not suit the drafter.
        OSError: a file that cannot be read.
    """
    entry = entry_of(text)
    if entry is None:
        return None
    with naming_errors("drafter", text):
        return class_of(text.partition(":")[0]).from_text(value_of(text))
