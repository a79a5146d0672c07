"""The entry points by which packages extend the loop and the command line.

Group "specdec.drafters" has tables of drafters by name (see `drafting.registry`),
"specdec.commands" has commands of the command line, and "specdec.plugins" the classes and functions
that the loop hands a call over to, such as beam search.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any


@functools.cache
def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group of all installed packages, by name.

    Raises:
        ValueError: two packages give one name to different objects.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ValueError(
                f"entry points of group {group} must differ in name, got {point.name!r} for "
                f"{other.value} and for {point.value}"
            )
    return found


def load(name: str, group: str = "specdec.plugins") -> Any:
    """The object behind a name of a group.

    Raises:
        ImportError: no installed package has it, or its package lacks another one.
        ValueError: as `entry_points_of`.
    """
    point = entry_points_of(group).get(name)
    if point is None:
        raise ImportError(
            f"{name!r} of {group} is in no installed package: install specdec-kernels again"
        )
    where = f"{name!r} of {group} cannot be loaded from {point.value}"
    try:
        module = importlib.import_module(point.module)
    except ImportError as error:
        raise ImportError(f"{where}: {error}", name=error.name) from error
    if not hasattr(module, point.attr):
        raise ImportError(f"{where}: the module has no {point.attr}")
    return getattr(module, point.attr)
