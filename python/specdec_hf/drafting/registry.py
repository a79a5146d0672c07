"""The drafters that have a name, for ``generate(drafter=...)`` and the command line.

This module does without torch, because the command line checks ``--drafter`` before it loads torch.
"""

from __future__ import annotations

import functools
import os
import pkgutil
from typing import Any

from specdec_hf import plugins
from specdec_hf.arguments import naming_errors
from specdec_hf.drafting.entry import FILE, FOLDER, DrafterEntry, entry_of_head

GROUP = "specdec.drafters"  # of the entry points whose objects are such tables
OURS = "specdec_papers"  # the one of this project
AUTO = "auto"  # the drafter of a call whose user leaves the choice to the library


_OWN: dict[str, DrafterEntry] = {
    AUTO: DrafterEntry(
        "specdec_hf.heads.auto:AutoDrafter",
        "copies from the text as prompt_lookup and suffix_automaton do, and drafts with the head "
        "that lies in the model's folder specdec_head, or that is shipped for it; all in one tree",
        own_tree=True,
    ),
    "prompt_lookup": DrafterEntry(
        "specdec_hf.drafters.copying:PromptLookupDrafter",
        "copies what followed the last tokens where they occurred before",
        several=True,
    ),
    "suffix_automaton": DrafterEntry(
        "specdec_hf.drafters.copying:SuffixAutomatonDrafter",
        "copies what most often followed the longest end of the text that occurred before, there "
        "or in the text that FILE was built from, and with keep=64MiB in those of earlier calls",
        value=FILE,
        check_file="specdec_host.corpus_file:map_file",
        options=("keep",),
        reports_confidence=True,
        several=True,
    ),
    "rest": DrafterEntry(
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
def _tables() -> tuple[dict[str, DrafterEntry], dict[str, Exception]]:
    """All drafters by name, and what is wrong: by a name that two tables have, or by a table."""
    found, faults = dict(_OWN), dict[str, Exception]()
    for package in sorted(plugins.entry_points_of(GROUP), key=lambda name: (name != OURS, name)):
        try:
            table = dict(plugins.load(package, GROUP))
            if not all(isinstance(entry, DrafterEntry) for entry in table.values()):
                raise TypeError("not every value is an DrafterEntry")
        except ImportError as error:
            faults[package] = error
            continue
        except (TypeError, ValueError) as error:
            faults[package] = ImportError(f"{package!r} of {GROUP} is no table of entries: {error}")
            continue
        for name in table.keys() & found.keys():
            faults[name] = ValueError(
                f"drafters must differ in name, got {name!r} for {found[name].place} and, by "
                f"{package} of {GROUP}, for {table[name].place}"
            )
        found |= {name: entry for name, entry in table.items() if name not in found}
    return found, faults


def drafters() -> dict[str, DrafterEntry]:
    """All drafters by name: those of this package, and of the sound tables of installed ones."""
    return _tables()[0]


def entry_called(name: str) -> DrafterEntry | None:
    """The entry of a name, which no other package can take from this one.

    Raises:
        ImportError: no table has it, and one cannot be loaded.
        ValueError: two tables have it.
    """
    if name in _OWN:
        return _OWN[name]
    found, faults = _tables()
    if name in faults or (faults and name not in found and name.isidentifier()):  # else a path
        raise faults.get(name) or next(iter(faults.values()))
    return found.get(name)


def entry_for(name: str) -> DrafterEntry:
    """The entry of a name of ours; an ImportError where its package is not installed."""
    entry = entry_called(name)
    if entry is None:
        raise ImportError(f"no table of {GROUP} has {name!r}: install specdec-kernels again")
    return entry


def usage(name: str) -> str:
    """A name with its text after the colon, such as ``ngram:FILE``."""
    entry = entry_for(name)
    if not entry.value:
        return name
    options = f"[,{entry.options[0]}=..]" if entry.options else ""
    value = entry.value + options
    return f"{name}:{value}" if entry.needs_value else f"{name}[:{value}]"


def usages() -> str:
    """All names with their texts, for messages."""
    missing = OURS not in plugins.entry_points_of(GROUP)
    return ", ".join(map(usage, drafters())) + (
        "; those of papers are missing: install specdec-kernels again" if missing else ""
    )


def entry_of(text: str) -> DrafterEntry | None:
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


def entry_named(text: str) -> DrafterEntry | None:
    """The entry of a drafter's text, whose value is not checked; None for those without a name."""
    return entry_called(text.partition(":")[0])


def value_of(text: str) -> str:
    """The text after the colon of ``NAME:TEXT``; where it may be a file, ~ is the home folder."""
    name, _, value = text.partition(":")
    entry = entry_called(name)
    is_path = entry is not None and (FILE in entry.value or FOLDER in entry.value)
    return os.path.expanduser(value) if is_path else value


def class_of(name: str) -> Any:
    """The class of the drafter ``name``, whose module is imported.

    Raises:
        ImportError: its module, or one that it needs, is not installed.
    """
    place = entry_for(name).place
    try:
        made = pkgutil.resolve_name(place)
    except ModuleNotFoundError as error:
        raise ImportError(f"drafter {name!r} at {place}: {error}", name=error.name) from error
    for attribute, value in entry_for(name).capabilities().items():
        if getattr(made, attribute) != value:
            raise TypeError(f"{place}.{attribute} must be {value}, as in its entry")
    return made


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
