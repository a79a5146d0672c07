"""Finds functions by their names, and texts in them token by token.

So a fault stays planted where it was when its function moves to another file or is laid out anew.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

Span = tuple[int, int]
STRING = r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])*'"
OPERATOR = r"<<=|>>=|\*\*=|<<|\*\*|->|::|:=|\+\+|--|&&|\|\||[-+*/%&|^=!<>]=|\S"
SKIPPED = {True: r"\s|\\\n|\#[^\n]*", False: r"\s|\\\n|//[^\n]*|/\*.*?\*/"}
TOKEN = {
    python: re.compile(
        rf"(?P<skipped>(?:{skipped})+)"
        + (r'|[rbfuRBFU]{0,2}(?:""".*?"""|' + STRING + ")" if python else "|" + STRING)
        + rf"|\d(?:[eE][-+](?=\d)|'(?=\w)|[\w.])*|\w+|{OPERATOR}",
        re.S,
    )
    for python, skipped in SKIPPED.items()
}
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh"}
# What may stand between the parameters of a function and its body.
QUALIFIERS = {"const", "noexcept", "override", "final", "mutable", "->"}


class Token(NamedTuple):
    """A word, a number, a string or an operator, and where it begins and ends."""

    text: str
    begin: int
    end: int


def tokens(text: str, python: bool, span: Span | None = None) -> list[Token]:
    """Those of a part of a file, without comments and white space."""
    found = TOKEN[python].finditer(text, *(span or (0, len(text))))
    return [Token(one[0], *one.span()) for one in found if one["skipped"] is None]


def occurrences(path: Path, span: Span, wanted: str) -> list[Span]:
    """Where the tokens of `wanted` occur in a part of a file."""
    text, python = read(path), path.suffix == ".py"
    sought = [one.text for one in tokens(wanted, python)]
    given = tokens(text, python, span)
    words = [one.text for one in given]
    places = range(len(given) - len(sought) + 1)
    return [
        (given[n].begin, given[n + len(sought) - 1].end)
        for n in places
        if words[n : n + len(sought)] == sought
    ]


@functools.cache
def files(folder: Path) -> Sequence[Path]:
    """The source files below a folder, or the one file."""
    if folder.is_file():
        return [folder]
    return [path for path in sorted(folder.rglob("*.*")) if path.suffix in SUFFIXES]


def definitions(path: Path, name: str) -> list[Span]:
    """Where a file defines a function, class, struct or constant: `name`, or `Class.name`.

    Without a name, the whole file.
    """
    text = read(path)
    if not name:
        return [(0, len(text))]
    last = name.rpartition(".")[2]
    if last not in _words(text, path.suffix == ".py"):
        return []
    if path.suffix == ".py":
        return [span for known, span in _outline(text) if f".{known}".endswith(f".{name}")]
    return list(_native(text, last))


def read(path: Path) -> str:
    """The text of a file, read again where it has changed."""
    return _text(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=2000)
def _text(path: Path, _changed: int) -> str:
    return path.read_text()


@functools.lru_cache(maxsize=2000)
def _words(text: str, python: bool) -> frozenset[str]:
    """Every name that a file may define."""
    names = r"\b(?:def|class) +(\w+)|^(\w+)\b" if python else r"(\w+)()"
    return frozenset(name for pair in re.findall(names, text, re.M) for name in pair)


@functools.lru_cache(maxsize=500)
def _outline(text: str) -> Sequence[tuple[str, Span]]:
    """The qualified names that a file of Python defines, and where."""
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Span]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            names, first = [], getattr(child, "lineno", 1)
            match child:
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                ):
                    names = [name]
                    first = min([first, *(one.lineno for one in child.decorator_list)])
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    names = [name] * isinstance(node, ast.Module)
            for name in names:
                yield prefix + name, (begins[first - 1], begins[child.end_lineno])
            inner = [f"{prefix}{name}." for name in names]
            yield from below(child, *(inner or [prefix]))

    return list(below(ast.parse(text), ""))


@functools.lru_cache(maxsize=500)
def _brackets(text: str) -> tuple[list[Token], dict[int, int]]:
    """The tokens of a native file, and the number of the one that closes each bracket."""
    given = tokens(text, python=False)
    closing, opened = {}, []
    for n, one in enumerate(given):
        if one.text in "([{":
            opened.append(n)
        elif one.text in ")]}" and opened:
            closing[opened.pop()] = n
    return given, closing


def _native(text: str, name: str) -> Iterator[Span]:
    """Where a native file defines a function, a struct or a constant of this name."""
    given, closing = _brackets(text)
    words = [one.text for one in given] + ["", ""]
    for n, word in enumerate(words[:-2]):
        end = None
        if word != name:
            continue
        if words[n + 1] == "(" and n + 1 in closing:
            end = _body(words, closing, closing[n + 1] + 1)
        elif words[n + 1] in "{:" and words[n - 1] in ("struct", "class", "enum"):
            end = next((at for at in range(n, len(given)) if words[at] == "{"), None)
        elif words[n + 1] in ("=", "[") and words[n - 1] not in (".", "->"):
            end = next(at for at in range(n, len(words)) if words[at] in (";", ""))
            yield given[n].begin, given[min(end, len(given) - 1)].end
            continue
        if end is not None and end in closing:
            begin = n
            while begin and words[begin - 1] not in (";", "}", "{", ":"):
                begin -= 1
            yield given[begin].begin, given[closing[end]].end


def _body(words: Sequence[str], closing: dict[int, int], n: int) -> int | None:
    """The bracket that opens a function's body, if what follows its parameters leads to one."""
    while words[n] in QUALIFIERS or (words[n - 1] == "->" and words[n] not in ("{", "")):
        n += 1
    if words[n] == ":":  # the members that a constructor sets
        while words[n] in (":", ",") and words[n + 1].isidentifier() and n + 2 in closing:
            n = closing[n + 2] + 1
    return n if words[n] == "{" else None
