"""A row of a table of drafters by name; the tables of packages do without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FILE = "FILE"  # the value of drafters that read a file
FOLDER = "FOLDER"  # of drafters that read a folder


@dataclass(frozen=True)
class DrafterEntry:
    """A drafter that has a name; its class reads this entry.

    Attributes:
        place: of its class, ``module:Class``; its `from_text` makes the drafter.
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


def entry_of_head(place: str, summary: str, **more: Any) -> DrafterEntry:
    """The entry of a drafter that reads a trained head in a folder."""
    return DrafterEntry(place, summary, FOLDER, needs_value=True, **more)
