"""Triton's interpreter without the work that it repeats in every operation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def patch_once() -> None:
    """Change nothing that a kernel computes; in a version that works otherwise, change nothing.

    The interpreter replaces the functions of `triton.language` in every call of a device function,
    on top of those it replaced before, which takes more time than the kernels do. It computes
    whether integers overflow and drops the answer, and it makes two tables for every value.
    """
    from triton.runtime import interpreter  # noqa: PLC0415  # Triton exists for Linux only

    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _replace_functions_once_a_launch(interpreter)
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if dataclasses.is_dataclass(options) and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        _remember_dtypes(interpreter)


def _replace_functions_once_a_launch(interpreter: Any) -> None:
    import triton.language as tl  # noqa: PLC0415

    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope

    def patched(fn: Any) -> Any:
        """The changes that end with the launch; none where all modules of a function have them."""
        known = [m for m in (tl, tl.core) if any(m is value for value in fn.__globals__.values())]
        return patch(fn) if any(tl.core.is_builtin(m.load) for m in known) else scope()

    interpreter._patch_lang = patched


def _remember_dtypes(interpreter: Any) -> None:
    """Which dtype of NumPy holds one of Triton; scalars are few, and their names differ."""
    find = interpreter._get_np_dtype
    of_name: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        element = getattr(dtype, "element_ty", None) if dtype.is_block() else dtype
        if element is None or element.is_ptr():
            return find(dtype)
        return of_name.get(element.name) or of_name.setdefault(element.name, find(element))

    interpreter._get_np_dtype = functools.wraps(find)(found)
