"""The time of the encoders of encoder-decoders.

An encoder runs once a call: it is the first block of a row of Figure 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from specdec_hf.drafting.drafter import Drafter
from specdec_hf.runner.protocol import is_encoder_decoder


@dataclass
class EncoderSeconds:
    """Seconds of the encoders of one call; 0 where there is none.

    Attributes:
        target: that of the target, which runs before the call's first round.
        drafter: that of the draft model, which runs as the drafter starts.
    """

    target: float = 0.0
    drafter: float = 0.0


@contextmanager
def timed_encoders(model: Any, drafter: Drafter | None = None) -> Iterator[EncoderSeconds]:
    """Count the seconds of the encoders while the body runs."""
    seconds = EncoderSeconds()
    with ExitStack() as stack:
        for name, one in (("target", model), ("drafter", getattr(drafter, "model", None))):
            if one is not None and is_encoder_decoder(one):
                stack.enter_context(_timed(one.get_encoder(), seconds, name))
        yield seconds


@contextmanager
def _timed(encoder: Any, seconds: EncoderSeconds, name: str) -> Iterator[None]:
    began: list[float] = []

    def before(module: Any, arguments: Any) -> None:
        began.append(perf_counter())

    def after(module: Any, arguments: Any, output: Any) -> None:
        took = perf_counter() - began.pop()
        setattr(seconds, name, getattr(seconds, name) + took)

    handles = [encoder.register_forward_pre_hook(before), encoder.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
