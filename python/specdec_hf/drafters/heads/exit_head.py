"""Drafting with the first layers of the target and a trained exit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_hf.drafters.heads.placed import PlacedHead
from specdec_hf.drafters.models.own_layers import OwnLayersDrafter
from specdec_hf.heads.exit import ExitHead, load_exit

if TYPE_CHECKING:
    from typing_extensions import Self


class ExitHeadDrafter(OwnLayersDrafter):
    """As `EarlyExitDrafter`, with a trained norm and projection before the final norm.

    Args:
        head: an `ExitHead`, or the folder of one. It is not changed.

    Raises:
        TypeError: no head.
        ValueError: a folder whose head cannot be read, by name of what is wrong.
    """

    name = "exit_head"

    def __init__(self, head: ExitHead | str | Path) -> None:
        super().__init__()
        self._head = PlacedHead(head, ExitHead, load_exit)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """With the head in a folder."""
        return cls(text)

    def check_config(self, config: Any) -> None:
        self._head.check_config(config)

    def parts(self, total: int) -> tuple[int, int]:
        return self._head.head.config.layer, total

    def exit_of(self, model: Any) -> Any:
        return self._head.on(model)
