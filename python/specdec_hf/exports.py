"""The public names of a package, loaded at first use from the modules that its stub names.

So the command line answers --help without importing torch and transformers. Type checkers read the
stub, and parsing it takes less than a millisecond.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazily(
    file: str, package: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package, from its ``__file__`` and name."""
    modules = {
        name.name: node.module
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(modules[name])
        except ImportError as error:
            from specdec_hf.requirements import explain  # noqa: PLC0415  # rarely needed

            raise ImportError(explain(error)) from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return list(modules), get, lambda: sorted({*vars(sys.modules[package]), *modules})
