"""The Triton provider: ops for CUDA devices, and for CPU tensors in Triton's interpreter.

The modules lie in the same rooms as those of the reference; `specdec_kernels._library.OPS` says
which module implements which op. None of them is imported, and triton neither, until an op is first
called: that import costs about a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .._ops import ops
from ..arguments.validation import validate

__all__ = ["implementation", "register"]

# Registered ops. A registration lasts as long as the object that made it.
_libraries: dict[str, torch.library.Library] = {}


def implementation(op: str, module: str) -> Callable[..., Any]:
    """Function `op` of a module of this package, with the op's validation before it."""

    def call(*args: Any) -> Any:
        validate(op, args)
        return getattr(importlib.import_module(f"{__name__}.{module}"), op)(*args)

    return call


def register(op: str, module: str, dispatch_key: str = "CUDA") -> None:
    """Register function `op` of a module of this package as the kernel of the op of that name.

    The op's schema must be defined already. A second call for the same op does nothing.
    """
    if op in _libraries:
        return
    library = torch.library.Library(ops.name, "IMPL")
    library.impl(op, implementation(op, module), dispatch_key)
    _libraries[op] = library
