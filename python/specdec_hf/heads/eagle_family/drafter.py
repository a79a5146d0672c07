"""What drafters with a head over pairs share: those of trees and those of chains."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from specdec_hf.drafters.chain import ChainState
from specdec_hf.drafters.growing_tree import (
    GrowingTreeDrafter,
    GrowingTreeState,
    call_for_tree,
)
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.drafter import RULES_OF_DRAWN_DRAFTS
from specdec_hf.heads.eagle_family.draft import HeadStepper
from specdec_hf.heads.eagle_family.head import PairHead
from specdec_hf.heads.placed import HeadDrafter, PlacedHead
from specdec_hf.runner.packed.blocks import DRAFT_WEIGHTS, checked_draft_weights
from specdec_hf.trees import EagleTree

P = TypeVar("P", bound=PairHead)


class PairTreeDrafter(HeadDrafter[P], GrowingTreeDrafter):
    """Base class of drafters of trees with a `PairHead`.

    Args:
        head: as in `HeadDrafter`, with the same errors.
        layout: size of the tree, which grows as EAGLE-2's does.
        draft_weights: "int8" or "float", see `HeadStepper`.
    """

    def __init__(
        self, head: P | PlacedHead[P] | str | Path, layout: EagleTree | None = None,
        draft_weights: str = DRAFT_WEIGHTS[0],
    ) -> None:  # fmt: skip
        super().__init__(head)
        self.draft_weights = checked_draft_weights(draft_weights)
        GrowingTreeDrafter.__init__(self, EagleTree() if layout is None else layout)

    def state_with(self, head: P, call: DrafterCall) -> GrowingTreeState:
        stepper = HeadStepper(
            head, call_for_tree(call, self.layout), draft_weights=self.draft_weights
        )
        if stepper.runs_fused:
            from specdec_hf.heads.eagle_family import fused_tree  # noqa: PLC0415  # on a CPU

            if (packed := fused_tree.packed_head_of(stepper)) is not None:
                return fused_tree.FusedTreeState(call, self.layout, stepper, packed)
        return GrowingTreeState(call, self.layout, stepper)


class PairChainDrafter(HeadDrafter[P]):
    """Base class of drafters of chains with a `PairHead`, each token with its distribution.

    Args:
        head: as in `HeadDrafter`, with the same errors.
        draft_weights: as in `PairTreeDrafter`.
    """

    draws = True
    rules = RULES_OF_DRAWN_DRAFTS

    def __init__(
        self, head: P | PlacedHead[P] | str | Path, draft_weights: str = DRAFT_WEIGHTS[0]
    ) -> None:
        super().__init__(head)
        self.draft_weights = checked_draft_weights(draft_weights)

    def state_with(self, head: P, call: DrafterCall) -> ChainState:
        stepper = HeadStepper(head, call, full_vocabulary=True, draft_weights=self.draft_weights)
        return ChainState(call, stepper)
