"""Drafting a chain with an EAGLE-3 head."""

from __future__ import annotations

from specdec_hf.drafters.context import DraftContext
from specdec_hf.drafters.heads.head_draft import HeadDraft
from specdec_hf.drafters.heads.head_drafter import HeadDrafter
from specdec_hf.drafters.models.model import ModelDrafter
from specdec_hf.heads.eagle3 import Eagle3Head
from specdec_hf.heads.files import load_head


class Eagle3ChainDrafter(HeadDrafter[Eagle3Head], ModelDrafter, entry="eagle3_chain"):
    """A trained head that drafts token by token, each with the distribution it was drawn from.

    Args:
        head: an `Eagle3Head`, or the folder of one. It is not changed.

    Raises:
        TypeError: no head.
        ValueError: a folder whose head cannot be read, by name of what is wrong.

    Source: EAGLE-3, arXiv 2503.01840.
    """

    rolls_back = False
    kind, load = Eagle3Head, staticmethod(load_head)
    model = None  # that of the call

    def draft_with(self, head: Eagle3Head, context: DraftContext) -> HeadDraft:
        self._context = context
        return HeadDraft(head, context, full_vocabulary=True)
