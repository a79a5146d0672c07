"""The drafters that have a name, for ``generate(drafter=...)`` and the command line.

This module does without torch, because the command line checks ``--drafter`` before it loads torch.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specdec_hf.arguments import PARAMETERS, naming_errors, read_number, split_options

AUTO = "auto"  # the drafter of a call whose user leaves the choice to the library
FILE = "FILE"  # the value of drafters that read a file
FOLDER = "FOLDER"  # of drafters that read a folder
# The other values that a drafter may take in the place of a file.
_NO_FILES = {"N": r"\d+", "A-B": r"\d{1,4}-\d{1,4}"}
# Sampling parameters of a draft model, which the command line takes after its name.
SAMPLING = tuple(PARAMETERS)


@dataclass(frozen=True)
class Entry:
    """A drafter that has a name; its class reads this entry.

    Attributes:
        place: of its class in this package, ``module:Class``; its `from_text` makes the drafter.
        summary: one line for users.
        value: what the text after a colon is, such as FILE in ``ngram:FILE``; empty where the
            drafter takes none.
        needs_value: whether there must be such a text.
        check_file: place of a function that refuses a file of another kind without torch; empty
            where the drafter alone does.
        options: names of what may follow it, as in ``layers:4,temperature=0.5``.
        own_tree: whether it drafts trees of its own.
        marks: by which config.json shows that a folder holds such a head: an architecture, a kind
            of the library speculators, or a field.
        serves_all: whether it drafts for any target, so that `bench` measures it without being
            asked to.
        draws, reports_confidence, several, is_model, leads_cascade: as in `Drafter`.
        makes_forward: `Needs.target_forward`.
    """

    place: str
    summary: str
    value: str = ""
    needs_value: bool = False
    check_file: str = ""
    options: tuple[str, ...] = ()
    own_tree: bool = False
    is_model: bool = False
    marks: tuple[str, ...] = ()
    serves_all: bool = True
    leads_cascade: bool = False
    makes_forward: bool = False
    draws: bool = False
    reports_confidence: bool = False
    several: bool = False

    @property
    def has_stats(self) -> bool:
        """Whether chains come with their distribution or a confidence."""
        return self.draws or self.reports_confidence

    def capabilities(self) -> dict[str, bool]:
        """Attributes of the class."""
        names = ("draws", "reports_confidence", "several", "is_model", "leads_cascade")
        return {name: getattr(self, name) for name in names}


def _head(place: str, summary: str, **more: Any) -> Entry:
    """The entry of a drafter that reads a trained head in a folder."""
    return Entry(f"heads.{place}", summary, FOLDER, needs_value=True, **more)


DRAFTERS: dict[str, Entry] = {
    AUTO: Entry(
        "heads.auto:AutoDrafter",
        "copies from the text as prompt_lookup and suffix_automaton do, and drafts with the head "
        "that lies in the model's folder specdec_head, or that is shipped for it; all in one tree",
        own_tree=True,
    ),
    "prompt_lookup": Entry(
        "drafters.copying:PromptLookupDrafter",
        "copies what followed the last tokens where they occurred before",
        several=True,
    ),
    "suffix_automaton": Entry(
        "drafters.copying:SuffixAutomatonDrafter",
        "copies what most often followed the longest end of the text that occurred before, there "
        "or in the text that FILE was built from, and with keep=64MiB in those of earlier calls",
        value=FILE,
        check_file="specdec_host.corpus_file:map_file",
        options=("keep",),
        reports_confidence=True,
        several=True,
    ),
    "rest": Entry(
        "drafters.copying:RestDrafter",
        "copies what most often followed the end of the text in the text that FILE was built from",
        value=FILE,
        needs_value=True,
        check_file="specdec_host.corpus_file:map_file",
        reports_confidence=True,
        several=True,
    ),
    "ngram": Entry(
        "drafters.ngram:NgramDrafter",
        "n-gram model of the text so far, with n-grams of N tokens; or also of the text that FILE "
        "was built from",
        value="N|FILE",
        check_file="specdec_hf.drafters.ngram_table:read_metadata",
        draws=True,
    ),
    "random": Entry(
        "drafters.ngram:RandomDrafter", "draws tokens uniformly at random, a baseline", draws=True
    ),
    "nasd": Entry(
        "drafters.nasd:NasdDrafter",
        "counts n-grams of the text and of the target's most likely next tokens",
        several=True,
    ),
    "layers": Entry(
        "drafters.layers:LayersDrafter",
        "the model's first N layers as a draft model with a cache of its own",
        value="N",
        needs_value=True,
        options=SAMPLING,
        is_model=True,
        draws=True,
    ),
    "early_exit": Entry(
        "drafters.own_layers:EarlyExitDrafter",
        "the model's first N layers, which the verification does not run again",
        value="N",
        needs_value=True,
        makes_forward=True,
        draws=True,
    ),
    "layer_skip": Entry(
        "drafters.own_layers:LayerSkipDrafter",
        "the model without its layers A to B, counted from 0, or without the attention and MLP "
        "sublayers that FILE lists; the layers before them run once",
        value="A-B|FILE",
        needs_value=True,
        makes_forward=True,
        draws=True,
    ),
    "sparse_cache": Entry(
        "drafters.sparse_cache:SparseCacheDrafter",
        "the model itself over the first tokens, the last ones and the chunks of the text that it "
        "attends to most, N tokens in all",
        value="budget=N",
        options=("chunk", "sinks", "recent", "interval"),
        leads_cascade=True,
        makes_forward=True,
        draws=True,
    ),
    "eagle3": _head(
        "eagle3.drafter:Eagle3Drafter",
        "trees of an EAGLE-3 head in a folder, which reads the model's hidden states",
        own_tree=True,
        marks=("eagle3", "LlamaForCausalLMEagle3"),
    ),
    "eagle3_chain": _head("eagle3.drafter:Eagle3ChainDrafter", "chains of such a head", draws=True),
    "eagle": _head(
        "eagle:EagleDrafter",
        "trees of a head of the first EAGLE in a folder, which predicts hidden states",
        own_tree=True,
    ),
    "eagle_chain": _head("eagle:EagleChainDrafter", "chains of such a head", draws=True),
    "peagle": _head(
        "peagle:PEagleDrafter",
        "chains of a P-EAGLE head in a folder, which drafts at mask tokens in one pass",
        draws=True,
        marks=("peagle",),
    ),
    "dflash": _head(
        "dflash:DFlashDrafter",
        "chains of a DFlash head in a folder, a block of mask tokens in one pass",
        draws=True,
        marks=("dflash",),
    ),
    "mtp": Entry(
        "heads.mtp.drafter:MtpDrafter",
        "chains of the layers of multi-token prediction in the model's own folder, or in FOLDER, "
        "which Transformers leaves out",
        value=FOLDER,
        serves_all=False,
        draws=True,
    ),
    "mtp_tree": Entry(
        "heads.mtp.drafter:MtpTreeDrafter",
        "trees of such a layer",
        value=FOLDER,
        own_tree=True,
        serves_all=False,
    ),
    "medusa": _head(
        "medusa:MedusaDrafter",
        "trees of Medusa heads in a folder",
        own_tree=True,
        marks=("medusa_num_heads",),
    ),
    "blockwise": _head(
        "blockwise:BlockwiseDrafter",
        "chains of the heads of blockwise parallel decoding in a folder",
        marks=("BlockwiseHeads",),
    ),
    "exit_head": _head(
        "exit_head:ExitHeadDrafter",
        "the model's first layers and a trained exit in a folder",
        makes_forward=True,
        draws=True,
        marks=("ExitHead",),
    ),
    "pass_head": _head(
        "pass_head:PassHeadDrafter",
        "the model itself at look-ahead embeddings in a folder, which follow the text",
        makes_forward=True,
        draws=True,
        marks=("PassHead",),
    ),
    "token_recycling": Entry(
        "drafters.token_recycling:TokenRecyclingDrafter",
        "trees of the target's latest most likely next tokens after each token",
        own_tree=True,
    ),
    "lookahead": Entry(
        "drafters.lookahead:LookaheadDrafter",
        "a window of W columns of guesses, and G of the N-grams that it has made",
        value="W,N,G",
        own_tree=True,
    ),
}


def usage(name: str) -> str:
    """A name with its text after the colon, such as ``ngram:FILE``."""
    entry = DRAFTERS[name]
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
    return ", ".join(map(usage, DRAFTERS))


def entry_of(text: str) -> Entry | None:
    """The entry that ``NAME`` or ``NAME:TEXT`` names; None for an unknown name.

    Raises:
        ValueError: a text that the drafter does not take, or none where it needs one.
    """
    name, colon, value = text.partition(":")
    entry = DRAFTERS.get(name)
    if entry is None:
        return None
    if value and not entry.value:
        raise ValueError(f"drafter {name!r} takes no value, got {text!r}")
    if not value and (colon or entry.needs_value):
        raise ValueError(f"drafter must be {usage(name)}, got {text!r}")
    return entry


def entry_named(text: str) -> Entry | None:
    """The entry of a drafter's text, whose value is not checked; None for those without a name."""
    return DRAFTERS.get(text.partition(":")[0])


def has_own_tree(drafters: Sequence[str]) -> bool:
    """Whether the only one of these drafters drafts trees of its own."""
    entry = entry_named(drafters[0]) if len(drafters) == 1 else None
    return entry is not None and entry.own_tree


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
    entry = DRAFTERS.get(name)
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
    marked = (name for name, entry in DRAFTERS.items() if any(x in names for x in entry.marks))
    name = next(marked, None)
    return text if name is None else f"{name}:{text}"


def value_of(text: str) -> str:
    """The text after the colon of ``NAME:TEXT``; where it may be a file, ~ is the home folder."""
    name, _, value = text.partition(":")
    entry = DRAFTERS.get(name)
    is_path = entry is not None and (FILE in entry.value or FOLDER in entry.value)
    return os.path.expanduser(value) if is_path else value


def names_file(name: str, value: str) -> bool:
    """Whether the text after the colon of drafter ``name`` is a file, not another of its values.

    >>> names_file("layer_skip", "4-9"), names_file("layer_skip", "4-9.json")
    (False, True)
    """
    kinds = DRAFTERS[name].value.split("|")
    others = (_NO_FILES[kind] for kind in kinds if kind in _NO_FILES)
    return bool(value) and FILE in kinds and not any(re.fullmatch(x, value) for x in others)


def class_of(name: str) -> Any:
    """The class of the drafter ``name``, whose module is imported."""
    return pkgutil.resolve_name(f"specdec_hf.{DRAFTERS[name].place}")


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
