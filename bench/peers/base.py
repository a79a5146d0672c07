"""What the harness knows of an implementation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class Unsupported(Exception):
    """The implementation has no answer for a point; the message says why."""


def _second(result: Any) -> Tensor:
    accepted: Tensor = result[1]
    return accepted


@dataclass(frozen=True)
class Peer:
    """An implementation of what is timed.

    available: device type -> "" if it can run there, or the reason why not.
    build: inputs of a point -> a call of one turn; raises `Unsupported`.
    accepted: what such a call returned -> drafts or nodes accepted [B].
    ours: it is one of this project's providers.
    reads: it reads the device from the host, so that no CUDA graph can hold it.
    compiles: its first call at new sizes takes long; only the points with a figure to reach get it.
    """

    name: str
    available: Callable[[str], str]
    build: Callable[[Any], Callable[[], Any]]
    accepted: Callable[[Any], Tensor] = _second
    ours: bool = False
    reads: bool = False
    compiles: bool = False


def importable(module: str) -> str:
    """ "" if the top-level module is installed, or that it is not."""
    return "" if importlib.util.find_spec(module) else f"{module} is not installed"
