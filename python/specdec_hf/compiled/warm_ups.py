"""Warm-ups: graphs are made and compared once for each kind of call, before its first round."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config as shape_settings

from specdec_hf.cache.own_logits import PASSING, one_line

# Dynamo gives up beyond this number of graphs of one function. A model needs four for each type of
# its layers: for one token and for several, of one sequence and of a batch.
MOST_GRAPHS = 64


@dataclass(frozen=True)
class WarmUp:
    """The outcome of a warm-up.

    Attributes:
        reason: why there are no graphs, or None.
        checked: whether logits were compared.
    """

    reason: str | None
    checked: bool

    def settles(self, check: bool) -> bool:
        """Whether a call, with or without a comparison of logits, needs no other warm-up."""
        return self.reason is not None or self.checked or not check


class WarmUps:
    """Runs the warm-ups of one compiled forward, and keeps their outcomes.

    Attributes:
        seconds: how long they took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._outcomes: dict[Hashable, WarmUp] = {}

    def run(
        self,
        kind: Hashable,
        check: bool,
        difference: Callable[[], str | None],
        *held: AbstractContextManager[Any],
    ) -> str | None:
        """Make the graphs for a kind of call, unless an earlier warm-up settles it.

        Args:
            kind: calls of one kind need the same graphs.
            check: whether ``difference`` compares logits.
            difference: makes the graphs, and returns how logits differ or None.
            held: entered in this order around ``difference``.

        Returns:
            Why the graphs do not serve such a call, or None. A reason is kept until
            `forget_failures`, so that what failed is not compiled again in each call.

        Raises:
            torch.OutOfMemoryError, MemoryError: no memory; the next call tries again.
        """
        known = self._outcomes.get(kind)
        if known is not None and known.settles(check):
            return known.reason
        started = time.perf_counter()
        try:
            with ExitStack() as stack:
                for context in (*held, compile_settings(), torch.inference_mode()):
                    stack.enter_context(context)
                reason = difference()
        except PASSING:
            raise
        except Exception as error:
            reason = f"torch.compile raised {one_line(error)}"
        finally:
            self.seconds += time.perf_counter() - started
        self._outcomes[kind] = WarmUp(reason, check)
        return reason

    def forget_failures(self) -> None:
        """Let calls that failed be tried again."""
        self._outcomes = {k: made for k, made in self._outcomes.items() if made.reason is None}


@contextmanager
def compile_settings() -> Iterator[None]:
    """Settings of a warm-up, in which each size of a shape is a symbol of its own."""
    limit = torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS)
    with limit, shape_settings.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield
