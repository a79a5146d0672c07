"""How mkdocstrings reads the docstrings of this project."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

# A doctest at the end of a docstring, where it stands under no heading.
DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
# Arguments with one description, `top_k, top_p: as in ...`, and its further lines.
SEVERAL = re.compile(r"^( +)(\w+(?:,\s+\w+)+)(: .*\n(?:\1 +.*\n|\n(?=\1 ))*)", re.MULTILINE)
# Where `specdec_hf.options.takes_options` puts the texts of the options.
OPTIONS = re.compile(r"^    OPTIONS$", re.MULTILINE)
REST = "    **kwargs: the options of docs/loop.md, and other arguments of ``model.generate``."


class Conventions(Extension):
    """Puts the conventions of this project into the words of Google's docstrings."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            text = OPTIONS.sub(REST, obj.docstring.value + "\n")
            text = SEVERAL.sub(
                lambda a: "".join(a[1] + name + a[3] for name in re.split(r",\s+", a[2])), text
            )
            text = DOCTEST.sub(lambda a: "Examples:\n" + textwrap.indent(a[0], "    "), text)
            obj.docstring.value = text.rstrip("\n")
