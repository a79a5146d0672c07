"""Drafting with the first layers of the target and a trained exit."""

from __future__ import annotations

from typing import Any

from specdec_hf.drafters.heads.head_drafter import HeadDrafter
from specdec_hf.drafters.models.own_layers import OwnLayersDrafter
from specdec_hf.heads.exit import ExitHead, load_exit


class ExitHeadDrafter(HeadDrafter[ExitHead], OwnLayersDrafter, entry="exit_head"):
    """As `EarlyExitDrafter`, with a trained norm and projection before the final norm.

    Args:
        head: an `ExitHead`, or the folder of one. It is not changed.

    Raises:
        TypeError: no head.
        ValueError: a folder whose head cannot be read, by name of what is wrong.
    """

    kind, load = ExitHead, staticmethod(load_exit)
    start = OwnLayersDrafter.start

    def parts(self, total: int) -> tuple[int, int]:
        return self._head.head.config.layer, total

    def exit_of(self, model: Any) -> Any:
        return self._head.on(model)
