"""Drafting a chain with an EAGLE-3 head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_hf.drafters.context import DraftContext
from specdec_hf.drafters.heads.head_draft import HeadDraft
from specdec_hf.drafters.heads.placed import PlacedHead
from specdec_hf.drafters.models.model import ModelDrafter
from specdec_hf.heads.eagle3 import Eagle3Head
from specdec_hf.heads.files import load_head

if TYPE_CHECKING:
    from typing_extensions import Self


class Eagle3ChainDrafter(ModelDrafter):
    """A trained head that drafts token by token, each with the distribution it was drawn from.

    Args:
        head: an `Eagle3Head`, or the folder of one. It is not changed.

    Raises:
        TypeError: no head.
        ValueError: a folder whose head cannot be read, by name of what is wrong.

    Source: EAGLE-3, arXiv 2503.01840.
    """

    name = "eagle3_chain"
    rolls_back = False

    def __init__(self, head: Eagle3Head | str | Path) -> None:
        self.model = None  # that of the call
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
        self._context = context
        draft: Any = HeadDraft(self._head.on(context.model), context, full_vocabulary=True)
        self._draft = draft
        self.relative_cost = self._draft.relative_cost
