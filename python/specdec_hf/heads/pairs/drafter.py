"""What drafters with a head over pairs share: those of trees and those of chains."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from specdec_hf.drafters.growing_tree import GrowingTreeDrafter
from specdec_hf.drafters.model import DrawingDrafter
from specdec_hf.drafting.context import DraftContext
from specdec_hf.heads.pairs.draft import HeadDraft
from specdec_hf.heads.pairs.head import PairHead
from specdec_hf.heads.placed import HeadDrafter, PlacedHead
from specdec_hf.trees import EagleTree

P = TypeVar("P", bound=PairHead)


class PairTreeDrafter(HeadDrafter[P], GrowingTreeDrafter):
    """Base class of drafters of trees with a `PairHead`.

    Args:
        head: as in `HeadDrafter`, with the same errors.
        layout: size of the tree, which grows as EAGLE-2's does.
    """

    def __init__(
        self, head: P | PlacedHead[P] | str | Path, layout: EagleTree | None = None
    ) -> None:
        super().__init__(head)
        GrowingTreeDrafter.__init__(self, EagleTree() if layout is None else layout)

    def draft_with(self, head: P, context: DraftContext) -> HeadDraft:
        return HeadDraft(head, self._begin(context))


class PairChainDrafter(HeadDrafter[P], DrawingDrafter):
    """Base class of drafters of chains with a `PairHead`, each token with its distribution."""

    def draft_with(self, head: P, context: DraftContext) -> HeadDraft:
        self._context = context
        return HeadDraft(head, context, full_vocabulary=True)
