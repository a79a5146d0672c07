"""Speculative decoding over Hugging Face models, verified by the fused ops of specdec_kernels.

>>> from specdec_hf import generate  # doctest: +SKIP
>>> out = generate(model, **inputs, max_new_tokens=64)  # doctest: +SKIP
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

# Names are loaded at first use, so that the command line answers --help without importing torch and
# transformers. The stub has them for type checkers, and parsing it takes less than a millisecond.
# No submodule may be called ``generate``: importing it would replace the function.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_MODULES = {
    name.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        from specdec_hf.requirements import explain  # noqa: PLC0415  # rarely needed

        raise ImportError(explain(error)) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
