"""What the command ``tune`` measures: drafters, then lengths, trees and schedules of the best.

A candidate has the settings of ``generate``, so all that it may be the command line takes too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from specdec_hf.cli.checks import Settings, Sources, check
from specdec_hf.drafting.registry import AUTO, entry_named, has_own_tree, parse_drafter
from specdec_hf.lab.bench.configs import MERGED, merged
from specdec_hf.options import PROFILED
from specdec_hf.schedules.registry import make_schedule, tree_schedules
from specdec_hf.trees import TrieTree

# All that need nothing but the model, except the baseline random.
DRAFTERS_TRIED = (
    AUTO, "prompt_lookup", "suffix_automaton", "ngram", "nasd", "token_recycling", "lookahead",
    f"prompt_lookup{MERGED}suffix_automaton",
)  # fmt: skip
LENGTHS_TRIED = (3, 5, 10)  # beside the default of the command line
TREES_TRIED = ("4,2,1", "2,2,1,1")
MIN_BATCHES = 5  # that finalists answer: intervals over fewer prompts are far too narrow
SCHEDULES_TRIED = ("heuristic", "optimal", "confidence", "egag")  # beside constant


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to draft.

    Attributes:
        given: its settings as a user would give them.
        named: whether the user named the drafter. Others are left out, with a remark, where the
            model refuses them.
        settings: the same, completed.
        sources: the models that they name.
    """

    given: Settings
    named: bool = False
    settings: Settings = field(init=False)
    sources: Sources = field(init=False)

    def __post_init__(self) -> None:
        settings = replace(self.given, sampling=dict(self.given.sampling))
        object.__setattr__(self, "sources", check(settings))
        object.__setattr__(self, "settings", settings)

    @property
    def name(self) -> str:
        """The drafters, how much they draft, and the schedule where it is not constant."""
        settings, words = self.settings, [MERGED.join(self.settings.drafter)]
        if isinstance(settings.tree, TrieTree):
            words.append(f"{settings.tree.depth} deep")
        elif settings.tree is not None:
            words.append(f"tree {','.join(map(str, settings.tree))}")
        elif settings.num_assistant_tokens is not None:
            words.append(f"{settings.num_assistant_tokens} tokens")
        if settings.num_assistant_tokens_schedule is not None:
            words.append(settings.num_assistant_tokens_schedule)
        return ", ".join(words)

    @property
    def options(self) -> dict[str, Any]:
        """What a profile holds of it: the options of `generate` that are not left open."""
        found = {name: getattr(self.settings, name) for name in PROFILED}
        drafters = [with_absolute_path(name) for name in self.settings.drafter]
        found["drafter"] = drafters if len(drafters) > 1 else drafters[0]
        return {name: value for name, value in found.items() if value is not None}

    def variant(self, **changes: Any) -> Candidate:
        """The same with other settings, which the user did not ask for."""
        return Candidate(replace(self.given, **changes))


def first_candidates(common: Settings, named: Iterable[str]) -> list[Candidate]:
    """The drafters with their defaults: those that need nothing, and those that the user names."""
    asked = [*named]
    names = dict.fromkeys([*DRAFTERS_TRIED, *asked])
    return [Candidate(replace(common, drafter=merged(name)), name in asked) for name in names]


def shapes_of(candidate: Candidate) -> list[Candidate]:
    """The candidate, and with other lengths or trees where its drafter leaves that open."""
    parts = candidate.settings.drafter
    if has_own_tree(parts):
        return [candidate]
    found = [candidate, *(candidate.variant(num_assistant_tokens=n) for n in LENGTHS_TRIED)]
    entry = entry_named(parts[0])
    if len(parts) == 1 and (entry is None or entry.several or entry.is_model):
        found += [candidate.variant(tree=tree) for tree in TREES_TRIED]
    return found


def schedules_of(candidate: Candidate) -> list[Candidate]:
    """The candidate, and with the other schedules that its drafter takes."""
    settings, parts = candidate.settings, candidate.settings.drafter
    trees = settings.tree is not None or has_own_tree(parts)
    entry = entry_named(parts[0])
    reads = not trees and (entry is None or entry.draws or entry.reports_confidence)
    names = [
        name for name in SCHEDULES_TRIED
        if (name in tree_schedules() or not trees)
        and (reads or not make_schedule(name).reads_token_stats)
    ]  # fmt: skip
    if parts == [AUTO] and trees:  # whose schedule is optimal where none is given
        names = ["constant"]
    return [candidate, *(candidate.variant(num_assistant_tokens_schedule=name) for name in names)]


def with_absolute_path(drafter: str) -> str:
    """The name of a drafter with the whole path of its file, so that it means the same elsewhere.

    >>> with_absolute_path("prompt_lookup"), with_absolute_path("layers:4,temperature=0.5")
    ('prompt_lookup', 'layers:4,temperature=0.5')
    """
    parts = parse_drafter(drafter)
    named = parts.entry is not None
    if (named and not parts.reads) or parts.value in ("", "embedded"):
        return drafter
    if not os.path.exists(parts.path):  # a hub id
        return drafter
    start = drafter.index(":") + 1 if named else 0
    return drafter[:start] + os.path.abspath(parts.path) + drafter[start + len(parts.value) :]
