"""How mkdocstrings reads the docstrings of this project."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object
from sources import google_style


class Conventions(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for each function, class and module."""
        if obj.docstring:
            obj.docstring.value = google_style(obj.docstring.value)
