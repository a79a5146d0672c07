"""Drafting with the target without some of its middle layers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from specdec_hf.arguments import check_integer
from specdec_hf.drafters.models.own_layers import OwnLayersDrafter

if TYPE_CHECKING:
    from typing_extensions import Self


class LayerSkipDrafter(OwnLayersDrafter, entry="layer_skip"):
    """The target without a run of layers.

    The layers before that run see each token once, as with `EarlyExitDrafter`. Those after it run
    again in the verification, because without the run before them they see other hidden states;
    they then overwrite the keys and values of the drafts. Until then they attend to the target's
    own keys and values of the committed text, so drafts need no cache of their own.

    Args:
        first, last: the layers that are left out, counted from 0; at least one layer comes before
            them.

    Raises:
        TypeError: a number that is no integer.
        ValueError: not 1 <= first <= last, and, when a call starts, layers that the target lacks.

    Source: Zhang et al. 2023, "Draft & Verify", arXiv 2309.08168.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = check_integer("first", first, 1), check_integer("last", last)
        if last < first:
            raise ValueError(f"last must be at least first = {first}, got {last}")

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Skips layers A to B."""
        found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", text)
        if found is None:
            raise ValueError(f"drafter must be layer_skip:A-B with two layers, got {text!r}")
        return cls(int(found[1]), int(found[2]))

    def parts(self, total: int) -> tuple[int, int]:
        if self.last >= total:
            raise ValueError(
                f"last must be below the target's {total} layers with drafter layer_skip, "
                f"got {self.last}"
            )
        return self.first, self.last + 1
