"""Drafting trees with Medusa heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import shown
from specdec_hf.drafters.context import History
from specdec_hf.drafters.drafter import RULES_OF_DETERMINISTIC_TREES, Draft
from specdec_hf.drafters.heads.parallel_draft import ParallelDrafter
from specdec_hf.drafters.tensors import mask_below_limits
from specdec_hf.heads.medusa import MedusaHeads
from specdec_hf.heads.parallel_files import load_medusa
from specdec_hf.trees.layouts import TreeSpec

# The best nodes of Medusa's product where the heads' tokens are right as often as in this table.
_RANKS = (4, 3, 2, 1, 1)
_ACCURACIES = ((0.5, 0.12, 0.06, 0.04), (0.3, 0.1, 0.05), (0.2, 0.08), (0.15,), (0.1,))
DEFAULT_TREE = TreeSpec.medusa(_RANKS, 12, _ACCURACIES)


class MedusaDrafter(ParallelDrafter[MedusaHeads], entry="medusa"):
    """Trained heads, each of which offers its most likely tokens at one depth of a fixed tree.

    Rule typical, which must be asked for, is that of the source and lossy; the other rules are not.

    Args:
        head: `MedusaHeads`, or the folder of some. They are not changed.
        tree: shape, such as `TreeSpec.medusa` makes; None is one of 12 nodes.

    Raises:
        TypeError: no heads, or no tree.
        ValueError: a folder whose heads cannot be read, by name of what is wrong, or a tree that is
            deeper than the heads are many.

    Source: Cai et al. 2024, arXiv 2401.10774.
    """

    rules = (*RULES_OF_DETERMINISTIC_TREES, "typical")
    kind, load = MedusaHeads, staticmethod(load_medusa)

    def __init__(self, head: MedusaHeads | str | Path, tree: TreeSpec | None = None) -> None:
        if not isinstance(tree, TreeSpec | None):
            raise TypeError(f"tree must be None or a TreeSpec, got {shown(tree)}")
        super().__init__(head)
        heads = self._head.head.config.num_heads
        self.tree = DEFAULT_TREE.cut(heads) if tree is None else tree
        if self.tree.depth > heads:
            raise ValueError(f"tree must be at most {heads} deep, got {self.tree.depth}")
        self.size, self.depth = self.tree.size, self.tree.depth

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        limits = self._draft.room(history, limits)
        depth = min(self.depth, int(limits.max()))
        if depth < 1:
            return None
        spec, states = self.tree.cut(depth), self._draft.states()
        depths, ranks = np.array(spec.depths), np.array(spec.ranks)
        levels = []
        for k in range(depth):
            here = torch.from_numpy(ranks[depths == k + 1]).to(states.device, non_blocking=True)
            levels.append(
                self._draft.top(states, k, int(ranks[depths == k + 1].max()) + 1)[:, here]
            )
        below = torch.from_numpy(depths)[None].to(states.device, non_blocking=True)
        tokens = mask_below_limits(torch.cat(levels, dim=1), below, limits)
        parents = torch.tensor(spec.parents).to(states.device, non_blocking=True)
        return Draft(tokens, parents.expand(len(tokens), -1), depth=depth)
