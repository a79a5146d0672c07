"""Arguments that ``model.generate`` does not hand to a ``custom_generate`` callable.

It keeps ``streamer``, ``assistant_model`` and a few others to itself, so that a decoder would drop
them without a word. They are still local variables of the frame that calls the decoder, which is
the only place to read them from.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from transformers.generation.utils import GenerationMixin

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_KEPT = ("streamer", "assistant_model", "negative_prompt_ids", "kwargs")


def kept_arguments() -> dict[str, Any]:
    """Arguments that the calling ``model.generate`` keeps to itself; empty for any other caller.

    Returns:
        The arguments that are not None, and ``kwargs``, a dict of the others that it was given.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return {}
    return {name: frame.f_locals[name] for name in _KEPT if frame.f_locals.get(name) is not None}
