"""Drafting trees with an EAGLE-3 head, which grow as those of EAGLE-2 do."""

from __future__ import annotations

from pathlib import Path

from specdec_hf.drafters.context import DraftContext
from specdec_hf.drafters.heads.head_draft import HeadDraft
from specdec_hf.drafters.heads.head_drafter import HeadDrafter
from specdec_hf.drafters.heads.placed import PlacedHead
from specdec_hf.drafters.trees.eagle import GrowingTreeDrafter
from specdec_hf.heads.eagle3 import Eagle3Head
from specdec_hf.heads.files import load_head
from specdec_hf.trees.layouts import EagleTree


class Eagle3Drafter(HeadDrafter[Eagle3Head], GrowingTreeDrafter, entry="eagle3"):
    """A trained head that reads the target's hidden states; see `specdec_hf.heads.eagle3`.

    Args:
        head: an `Eagle3Head`, or the folder of one. It is not changed. A `PlacedHead` shares its
            copy with other drafters.
        layout: size of the tree.

    Raises:
        TypeError: no head.
        ValueError: a folder whose head cannot be read, by name of what is wrong.

    Source: EAGLE-3, arXiv 2503.01840.
    """

    kind, load = Eagle3Head, staticmethod(load_head)

    def __init__(
        self,
        head: Eagle3Head | PlacedHead[Eagle3Head] | str | Path,
        layout: EagleTree | None = None,
    ) -> None:
        super().__init__(head)
        GrowingTreeDrafter.__init__(self, EagleTree() if layout is None else layout)

    def draft_with(self, head: Eagle3Head, context: DraftContext) -> HeadDraft:
        return HeadDraft(head, self._begin(context))
