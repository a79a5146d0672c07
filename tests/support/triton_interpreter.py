"""Triton's interpreter without the work that it repeats in every call of a device function."""

from __future__ import annotations

from typing import Any


def patch_once() -> None:
    """Let a launch replace the functions of `triton.language` once.

    The interpreter replaces them in every call of a device function, on top of those it replaced
    before, which takes more time than the kernels do.
    """
    import triton.language as tl  # noqa: PLC0415  # Triton exists for Linux only
    from triton.runtime import interpreter  # noqa: PLC0415

    patch = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:  # in a version of Triton that works otherwise
        return

    def patched(fn: Any) -> Any:
        """The changes that end with the launch; none where all modules of a function have them."""
        known = [m for m in (tl, tl.core) if any(m is value for value in fn.__globals__.values())]
        return patch(fn) if any(tl.core.is_builtin(m.load) for m in known) else scope()

    interpreter._patch_lang = patched
