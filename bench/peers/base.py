"""The interface of an implementation that is timed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class Unsupported(Exception):
    """The implementation does not support a config; the message says why."""


def _second(result: Any) -> Tensor:
    accepted: Tensor = result[1]
    return accepted


@dataclass(frozen=True)
class Peer:
    """An implementation of an op.

    available: device type -> "" if it can run there, else the reason why not.
    build: inputs of a config -> a function that makes one call; raises `Unsupported`.
    accepted: the result of such a call -> number of accepted drafts or nodes [B].
    ours: whether it is one of this project's providers.
    reads: whether the host reads from the device during a call, which a CUDA graph cannot capture.
    compiles: whether the first call at new sizes takes long, so that only some configs time it.
    """

    name: str
    available: Callable[[str], str]
    build: Callable[[Any], Callable[[], Any]]
    accepted: Callable[[Any], Tensor] = _second
    ours: bool = False
    reads: bool = False
    compiles: bool = False


def importable(module: str) -> str:
    """An empty string if the top-level module is installed, else a message that it is not."""
    return "" if importlib.util.find_spec(module) else f"{module} is not installed"
