"""What the command ``tune`` measures: drafters, then lengths, trees and schedules of the best.

A candidate has the settings of ``generate``, so all that it may be the command line takes too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from specdec_hf.cli.checks import Settings, Sources, check, has_own_tree
from specdec_hf.cli.sources import Source
from specdec_hf.drafting.parsed import parse_drafter
from specdec_hf.drafting.registry import AUTO, entry_named
from specdec_hf.schedules.registry import make_schedule, tree_schedules
from specdec_hf.trees import TrieTree

from specdec_lab.bench.configs import MERGED, merged

# All that need nothing but the model, except the baseline random.
DRAFTERS_TRIED = (
    AUTO, "prompt_lookup", "suffix_automaton", "ngram", "nasd", "token_recycling", "lookahead",
    f"prompt_lookup{MERGED}suffix_automaton",
)  # fmt: skip
LENGTHS_TRIED = (3, 7, 10)  # beside the default
TREES_TRIED = ("4,2,1", "2,2,1,1")
# What a candidate says beside its drafters; the last is the user's, and the same for all.
OPTIONS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "tree", "compile")
MIN_BATCHES = 5  # that finalists answer: intervals over fewer prompts are far too narrow
SCHEDULES_TRIED = ("heuristic", "optimal", "confidence", "egag")  # beside constant


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to draft.

    Attributes:
        given: its settings as a user would give them.
        settings: the same, completed.
        sources: the models that they name.
        named: whether the user named the drafter. Others are left out, with a remark, where the
            model refuses them.
    """

    given: Settings
    settings: Settings
    sources: Sources
    named: bool = False

    @classmethod
    def of(cls, given: Settings, *, named: bool = False) -> Candidate:
        """The candidate of settings that are still to be checked."""
        return cls(given, *check(given), named)

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
    def call(self) -> str:
        """The call of `generate` that drafts like this."""
        drafters = [*map(_name_in_python, self.settings.drafter, self.sources.drafters)]
        given = {name: getattr(self.settings, name) for name in OPTIONS}
        if drafters == [None]:  # the command line has a length even so
            given["num_assistant_tokens"] = None
        words = [f"drafter={drafters if len(drafters) > 1 else drafters[0]!r}"]
        words += [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return f"generate(model, **inputs, {', '.join(words)})"

    @property
    def command(self) -> str:
        """The command that drafts like this."""
        words = ["--model", self.given.model, "--prompt", "TEXT"]
        for drafter in self.given.drafter:
            words += ["--drafter", drafter]
        for name in OPTIONS:
            value, option = getattr(self.given, name), name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            elif value is not None:
                words += [f"--{option}", str(value)]
        return shlex.join(["python", "-m", "specdec_hf", "generate", *words])

    def variant(self, **changes: Any) -> Candidate:
        """The same with other settings, which the user did not ask for."""
        return Candidate.of(replace(self.given, **changes))


def first_candidates(common: Settings, named: Iterable[str]) -> list[Candidate]:
    """The drafters with their defaults: those that need nothing, and those that the user names."""
    asked = [*named]
    names = dict.fromkeys([*DRAFTERS_TRIED, *asked])
    return [
        Candidate.of(replace(common, drafter=merged(name)), named=name in asked) for name in names
    ]


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


def _name_in_python(drafter: str, source: Source | None) -> str | None:
    """A drafter of the command line as `generate` takes it, which looks up no model by its name."""
    if drafter == "none":
        return None
    if source is None:
        return drafter
    return drafter.replace(parse_drafter(drafter).value, str(source.path), 1)
