"""What the plug-in says to the users of vLLM, whose logger shows what this one gets."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("vllm.plugins.specdec_vllm")


@functools.cache
def warn_once(message: str) -> None:
    """A warning that a step would otherwise repeat."""
    log.warning(message)
