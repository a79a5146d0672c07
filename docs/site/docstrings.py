"""How mkdocstrings reads the docstrings of this project."""

from __future__ import annotations

from typing import Any

from griffe import Docstring, DocstringSection, Extension, Object
from sources import google_style, merge_groups


class Conventions(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for each function, class and module."""
        if obj.docstring:
            obj.docstring.value = google_style(obj.docstring.value)
            obj.docstring.__class__ = Grouped


class Grouped(Docstring):
    """Shows what has one description in the source as one entry."""

    def parse(self, *args: Any, **options: Any) -> list[DocstringSection]:
        """The sections, whose entries are lists except in texts."""
        sections = super().parse(*args, **options)
        for section in sections:
            if isinstance(section.value, list):
                section.value = merge_groups(section.value)
        return sections
