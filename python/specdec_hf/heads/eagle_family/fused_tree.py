"""Trees of a head on packed weights, each grown in one op."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import nn

from specdec_hf.drafters.growing_tree import GrowingTreeState
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, State
from specdec_hf.heads.eagle_family.draft import HeadStepper, following_tokens
from specdec_hf.heads.eagle_family.fused_layer import FusedLayer
from specdec_hf.runner.protocol import to_device
from specdec_hf.trees import EagleTree
from specdec_kernels import PackedHead, grow_tree_


def packed_head_of(stepper: HeadStepper) -> PackedHead | None:
    """The weights of a head as `grow_tree_` takes them; None where it drafts in another way."""
    head, step, layer = stepper.head, stepper.step, stepper.step.midlayer
    table = head.embeddings
    if table is None:
        embed = stepper.model.get_input_embeddings()
        if type(embed) is not nn.Embedding or embed.max_norm is not None:
            return None
        if embed._forward_hooks or embed._forward_pre_hooks:
            return None
        table = embed.weight.detach()
    if not isinstance(layer, FusedLayer) or layer.layers.layers[0].epsilon != step.norm.eps:
        return None
    fits = table.dtype == step.dtype and table.device.type == "cpu" and table.is_contiguous()
    if not fits or int(head.tokens.max()) >= len(table):
        return None
    norm = step.norm.weight.detach().to(step.dtype)
    return PackedHead(layer.layers, table, norm, step.output.packed_weight, head.tokens)


class FusedTreeState(GrowingTreeState):
    """A `GrowingTreeState` whose levels are all drafted in one op.

    Args:
        call, layout, stepper: as in `GrowingTreeState`.
        head: `packed_head_of` the stepper.
    """

    stepper: HeadStepper

    def __init__(
        self, call: DrafterCall, layout: EagleTree, stepper: HeadStepper, head: PackedHead
    ) -> None:
        super().__init__(call, layout, stepper)
        self.head = head

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        stepper, layout = self.stepper, self.layout
        limits = stepper.room(texts, limits)
        levels = int(limits.max())
        if levels < 1:
            return None
        hidden, counts = stepper.waiting()
        tokens = following_tokens(texts, counts, hidden.shape[1], stepper.device)
        # A sequence that has ended has no pairs; what is fed for it is overwritten.
        fed = np.maximum(counts, 1) + (levels - 1) * layout.width
        slots = int((stepper.lengths + np.maximum(fed, hidden.shape[1])).max())
        cosines, sines, caches = stepper.buffers(slots)
        starts, fed_pairs, limits_ = (
            to_device(x, stepper.device) for x in (stepper.lengths, np.maximum(counts, 1), limits)
        )
        tree = grow_tree_(
            hidden, tokens, self.head, cosines, sines, caches, starts, counts=fed_pairs,
            limits=limits_, width=layout.width, size=self.size,
            min_probability=layout.min_probability,
        )  # fmt: skip
        stepper.lengths = stepper.lengths + counts
        size = int((tree.tokens >= 0).sum(dim=1).max())  # absent nodes come last
        tokens, parents, scores = (x[:, :size] for x in tree[:3])
        return Draft(tokens, parents, depth=int(tree.levels.max()), scores=scores)

    # The pairs of committed drafts are fed again, with the target's features.
    commit = State.commit

    @property
    def joins(self) -> bool:
        return True
