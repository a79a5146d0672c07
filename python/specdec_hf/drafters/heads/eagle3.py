"""Drafting trees with an EAGLE-3 head, which grow as those of EAGLE-2 do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_hf.drafters.context import DraftContext
from specdec_hf.drafters.heads.head_draft import HeadDraft
from specdec_hf.drafters.heads.placed import PlacedHead
from specdec_hf.drafters.trees.eagle import GrowingTreeDrafter
from specdec_hf.heads.eagle3 import Eagle3Head
from specdec_hf.heads.files import load_head
from specdec_hf.trees.layouts import EagleTree

if TYPE_CHECKING:
    from typing_extensions import Self


class Eagle3Drafter(GrowingTreeDrafter):
    """A trained head that reads the target's hidden states; see `specdec_hf.heads.eagle3`.

    Args:
        head: an `Eagle3Head`, or the folder of one. It is not changed.
        layout: size of the tree.

    Raises:
        TypeError: no head.
        ValueError: a folder whose head cannot be read, by name of what is wrong.

    Source: EAGLE-3, arXiv 2503.01840.
    """

    name = "eagle3"

    def __init__(self, head: Eagle3Head | str | Path, layout: EagleTree | None = None) -> None:
        super().__init__(EagleTree() if layout is None else layout)
        self._head = PlacedHead(head, Eagle3Head, load_head)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """With the head in a folder."""
        return cls(text)

    def check_config(self, config: Any) -> None:
        self._head.check_config(config)

    def start(self, context: DraftContext) -> None:
        """Place the head on the target's device.

        Raises:
            ValueError: a target that the head was not trained for.
        """
        context = self._begin(context)
        self._draft = HeadDraft(self._head.on(context.model), context)
        self.relative_cost = self._draft.relative_cost
