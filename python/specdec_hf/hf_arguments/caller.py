"""Arguments that ``model.generate`` does not hand to a ``custom_generate`` callable.

It keeps ``streamer``, ``assistant_model`` and a few others to itself, so that a decoder would drop
them without a word. They are still local variables of the frame that calls the decoder, which is
the only place to read them from. ``tokenizer`` and ``assistant_tokenizer`` are removed even there;
the frame of the decorator around ``generate`` still has them.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from transformers.generation.utils import GenerationMixin

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_DECORATOR = GenerationMixin.generate.__code__  # of torch.no_grad
_KEPT = (
    "streamer", "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask",
    "synced_gpus", "kwargs",
)  # fmt: skip
_REMOVED = ("tokenizer", "assistant_tokenizer")


def kept_arguments(model: Any, decoder: Any) -> dict[str, Any]:
    """Arguments that the ``model.generate`` that called a decoder keeps; empty for others.

    Args:
        model: the model that the decoder was called with.
        decoder: the decoder. A function of the caller's own may stand between the two.

    Returns:
        The arguments that are not None, and ``kwargs``, a dict of the others that it was given.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return {}
    held = frame.f_locals
    # A decoder may also be called within a generate that decodes something else, as by a processor.
    called = held.get("custom_generate")
    other = called is not decoder and isinstance(called, type(decoder))
    if held.get("self") is not model or not callable(called) or other:
        return {}
    kept = {name: held[name] for name in _KEPT if held.get(name) is not None}
    around = frame.f_back
    given = around.f_locals["kwargs"] if around and around.f_code is _DECORATOR else {}
    return kept | {name: given[name] for name in _REMOVED if given.get(name) is not None}
