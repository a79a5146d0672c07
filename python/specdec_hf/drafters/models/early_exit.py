"""Drafting with the first layers of the target, its final norm and its head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_hf.arguments import check_integer
from specdec_hf.drafters.models.own_layers import OwnLayersDrafter

if TYPE_CHECKING:
    from typing_extensions import Self


class EarlyExitDrafter(OwnLayersDrafter, entry="early_exit"):
    """The target after its first layers; the verification runs the others, so none runs twice.

    It needs cache "spec" and a model with a plain list of layers, such as Llama, Qwen and GPT-2.
    Models that were trained to exit early accept more of its drafts.

    Args:
        layers: how many of the target's layers draft.

    Raises:
        TypeError: ``layers`` is no integer.
        ValueError: ``layers`` is below 1, and, when a call starts, not below the target's number.

    Source: Elhoushi et al. 2024, "LayerSkip", arXiv 2404.16710.
    """

    def __init__(self, layers: int) -> None:
        self.layers = check_integer("layers", layers, 1)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Exits after N layers."""
        if not (text.isdecimal() and len(text) < 5):
            raise ValueError(f"drafter must be early_exit:N with a number of layers, got {text!r}")
        return cls(int(text))

    def parts(self, total: int) -> tuple[int, int]:
        if self.layers >= total:
            raise ValueError(
                f"layers must be below the target's {total} with drafter early_exit, "
                f"got {self.layers}"
            )
        return self.layers, total
