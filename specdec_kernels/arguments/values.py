"""Values that are neither tensors nor arrays.

The file is a link in specdec_host too, so it must not import torch.
"""

from __future__ import annotations

_LONGEST = 100  # characters of a value in a message


def shown(value: object) -> str:
    """A value as messages print it: an array, or one with a long text, by its type and size."""
    size = getattr(value, "shape", None)
    if isinstance(size, tuple) and size:
        return f"{type(value).__name__} {list(size)}"
    name = type(value).__name__
    if isinstance(value, str | bytes | list | tuple | dict | set):
        name += f" of length {len(value)}"
        if len(value) > _LONGEST:
            return name
    text = repr(value)
    return text if len(text) <= _LONGEST and "\n" not in text else name


def require_flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def number_of(value: object, name: str, names: tuple[str, ...]) -> int:
    """The number by which an op takes a name: its index in one of the tuples of rules.py."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")
    if value not in names:
        raise RuntimeError(f"{name} must be one of {', '.join(names)}, got {value}")
    return names.index(value)
