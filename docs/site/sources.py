"""What the documentation site takes from the repository: ops, names, docstrings and links."""

from __future__ import annotations

import ast
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Documents beside docs/ -> their pages.
BESIDE = {
    "README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"
}  # fmt: skip
# Tags, and programs with all that is inside.
UNREAD = re.compile(r"<(pre|code|script|style)\b.*?</\1>|<[^>]*>", re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")

# A doctest at the end of a docstring, where it stands under no heading.
DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
# Arguments with one description, `top_k, top_p: as in ...`, and its further lines.
SEVERAL = re.compile(r"^( +)(\w+(?:,\s+\w+)+)(: .*\n(?:\1 +.*\n|\n(?=\1 ))*)", re.MULTILINE)


def ops() -> dict[str, list[str]]:
    """Each public function of `specdec_kernels.ops`, with the classes that its signature names.

    A class is described with the first function that returns it, or else takes it. The classes of
    its fields are described with it.
    """
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "specdec_kernels/ops").glob("[!_]*.py")):
        body = ast.parse(file.read_text()).body
        fields = {n.name: _names(n.body) for n in body if isinstance(n, ast.ClassDef)}
        classes = {*fields}
        functions = [n for n in body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
        for returned in (True, False):
            for function in functions:
                where = function.returns if returned else function.args
                named = _names([where or function])
                named |= set().union(*(fields[name] for name in named & classes))
                found.setdefault(function.name, []).extend(sorted(named & classes))
                classes -= named
    return found


def _names(nodes: list[Any]) -> set[str]:
    """The names that annotations and statements name."""
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def names_of(package: str) -> list[str]:
    """The public names of a package, each with the module that defines it."""
    stub = ast.parse((ROOT / "python" / package / "__init__.pyi").read_text())
    imports = [n for n in stub.body if isinstance(n, ast.ImportFrom)]
    return [f"{n.module}.{name.name}" for n in imports for name in n.names]


def google_style(docstring: str) -> str:
    """A docstring with this project's conventions put into the words of Google's style.

    Doctests come under a heading, and arguments with one description get one each.
    """
    text = SEVERAL.sub(
        lambda a: "".join(a[1] + name + a[3] for name in re.split(r",\s+", a[2])), docstring + "\n"
    )
    text = DOCTEST.sub(lambda a: "Examples:\n" + textwrap.indent(a[0], "    "), text)
    return text.rstrip("\n")


def merge_groups(entries: list[Any]) -> list[Any]:
    """The entries of a section, with those that share a description made into one.

    `google_style` repeats the description of a group for each of its names, because the parser
    takes one name an entry. A type or a default that the group does not share is left out.
    """
    merged: list[Any] = []
    for entry in entries:
        last = merged[-1] if merged else None
        if last is None or getattr(entry, "description", "") != getattr(last, "description", None):
            merged.append(entry)
        elif hasattr(entry, "name"):
            last.name += f", {entry.name}"
            if str(entry.annotation) != str(last.annotation):
                last.annotation = None
            if str(entry.value) != str(last.value):
                last.value = None
        else:  # an error
            last.annotation = f"{last.annotation}, {entry.annotation}"
    return merged


def commands_left(html: str) -> list[str]:
    """The commands of TeX that readers of a page would see outside of programs."""
    return sorted({*re.findall(r"\\[A-Za-z]+", UNREAD.sub(" ", html))})


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Let the links of a page, which are right in the repository, lead to pages of the site."""
    beside = {made: name for name, made in BESIDE.items()}
    folder = posixpath.dirname(beside.get(page, f"docs/{page}"))

    def on_the_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        return posixpath.relpath(
            BESIDE.get(path, path.removeprefix("docs/")), posixpath.dirname(page)
        )

    return LINK.sub(on_the_site, markdown)
