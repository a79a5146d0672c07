"""The Triton provider: ops for CUDA devices, and for CPU tensors in Triton's interpreter.

The modules lie in the same rooms as those of the reference; `specdec_kernels._library.OPS` says
which module implements which op. None of them is imported, and triton neither, until an op is first
called: that import costs about a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .._ops import ops
from ..arguments.validation import validate

__all__ = ["copying", "implementation"]


def implementation(op: str, module: str) -> Callable[..., Any]:
    """Function `op` of a module of this package, with the op's validation before it."""

    def call(*args: Any) -> Any:
        validate(op, args)
        return getattr(importlib.import_module(f"{__name__}.{module}"), op)(*args)

    return call


def copying(op: str, implementation: Callable[..., Any]) -> Callable[..., None]:
    """`<op>_out` of an implementation that allocates its results: they are copied afterwards."""
    number = len(getattr(ops, op).default._schema.arguments)

    def call(*args: Any) -> None:
        validate(f"{op}_out", args)
        *out, _ = args[number:]
        for given, result in zip(out, implementation(*args[:number]), strict=True):
            if given is not None and given.numel():
                given.copy_(result)

    return call
