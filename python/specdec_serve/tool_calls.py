"""Calls of tools: the JSON that an answer is made to be, and how it is read as it grows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

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
    moved = {name: _moved(one, place) for name, one in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
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
        self._text = ""

    def add(self, text: str) -> str:
        """What a piece of the text appends to the arguments."""
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
