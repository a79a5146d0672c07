"""What the plug-in says to the users of vLLM, whose logger shows what this one gets."""

from __future__ import annotations

import logging

log = logging.getLogger("vllm.plugins.specdec_vllm")
warned: set[str] = set()


def warn_once(message: str, *values: object) -> None:
    """A warning that a step would otherwise repeat, perhaps with other values in its message."""
    if message not in warned:
        warned.add(message)
        log.warning(message, *values)
