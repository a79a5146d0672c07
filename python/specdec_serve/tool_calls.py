"""Calls of tools: the JSON that an answer has to be, and how it is read as it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

VALUES = ("const", "enum", "default", "examples")  # keys of a schema that hold no schemas
HEAD = re.compile(r'\{"name": "([^"]*)", "arguments": ')


def schema_of_call(functions: Sequence[tuple[str, dict[str, Any]]], chosen: str) -> dict[str, Any]:
    """The schema of the text that calls one of some functions.

    Args:
        functions: name and JSON schema of the parameters of each.
        chosen: name of the one that is called, whose arguments are then the text; "" leaves the
            choice to the model, and the text has the name, too.
    """
    if chosen:
        return dict(functions)[chosen]
    calls = []
    for number, (name, parameters) in enumerate(functions):
        place = f"#/anyOf/{number}/properties/arguments"
        properties = {"name": {"const": name}, "arguments": _moved(parameters, place)}
        calls.append({
            "type": "object", "properties": properties, "required": [*properties],
            "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": calls}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself hold where it is at ``place`` of another one."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        name: one if name in VALUES else _moved(one, place)
        for name, one in schema.items()
        if name != "$id"  # from which references would go out
    }
    if isinstance(reference := schema.get("$ref"), str) and re.match("#(/|$)", reference):
        moved["$ref"] = place + reference[1:]
    return moved


class GrowingCall:
    """Reads a text of `schema_of_call` as it grows.

    Args:
        chosen: as there.

    Attributes:
        name: of the function; "" until it is known.
    """

    def __init__(self, chosen: str) -> None:
        self.name, self._has_name = chosen, not chosen
        self._text, self._arguments = "", ""

    def add(self, text: str, *, is_last: bool) -> str:
        """The part of the arguments that a piece of the text has."""
        ready = self._read(text)
        self._arguments += ready
        if is_last and self.name and not _is_whole(self._arguments):  # the text was cut
            ready += self._text
        return ready

    def _read(self, text: str) -> str:
        self._text += text
        if not self.name:
            head = HEAD.match(self._text)
            if head is None:
                return ""
            self.name, self._text = head[1], self._text[head.end() :]
        # The last brace so far may be the one that ends the call.
        ready = self._text.removesuffix("}") if self._has_name else self._text
        self._text = self._text[len(ready) :]
        return ready


def _is_whole(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True
