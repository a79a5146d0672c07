"""The arguments of an op as a named tuple, of which the op's schema gives the names and order."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from .._ops import ops

if TYPE_CHECKING:
    from typing_extensions import Self


class OpArguments(tuple[Any, ...]):
    """The base of classes that write the types of an op's arguments, in any order."""

    if TYPE_CHECKING:  # `named_by_schema` adds the named tuple that has these
        _fields: ClassVar[tuple[str, ...]]

        def __new__(cls, *args: Any, **named: Any) -> Self: ...
        def _replace(self, **changed: Any) -> Self: ...
        def _asdict(self) -> dict[str, Any]: ...


Types = TypeVar("Types", bound=OpArguments)


def named_by_schema(op: str) -> Callable[[type[Types]], type[Types]]:
    """Decorate what writes the types of an op's arguments: it becomes their named tuple."""

    def named(types: type[Types]) -> type[Types]:
        names = [argument.name for argument in getattr(ops, op).default._schema.arguments]
        attributes = {"__doc__": types.__doc__, "__module__": types.__module__, "__slots__": ()}
        return type(types.__name__, (types, namedtuple(types.__name__, names)), attributes)

    return named
