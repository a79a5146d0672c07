"""Drafting a tree of fixed shape with one draft model, or with several that draft it in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.context import DraftContext, History, reads_draft
from specdec_hf.drafters.drafter import (
    RULES_OF_DETERMINISTIC_TREES,
    Draft,
    Drafter,
    DraftOutcome,
)
from specdec_hf.drafters.models.draft_model import DraftModel
from specdec_hf.drafters.tensors import concat_distributions, mask_below_limits
from specdec_hf.drafters.trees.children import MAX_WIDTH, Children, draw_children
from specdec_hf.trees.checks import MAX_NODES
from specdec_hf.trees.layouts import Forest, TreeSpec
from specdec_kernels import TREE_RULES_READING_DRAFT

# Rule "auto" is multi_draft_wor, and the other rules that read the draft precede those that do not.
RULES_OF_ONE_MODEL: tuple[str, ...] = tuple(
    dict.fromkeys(("multi_draft_wor", *TREE_RULES_READING_DRAFT, *RULES_OF_DETERMINISTIC_TREES))
)
# Siblings of several models have several distributions, for which these rules are not defined.
RULES_OF_ONE_DISTRIBUTION = ("top_k_plus_one", "k_seq")
RULES_OF_SEVERAL_MODELS = tuple(
    rule for rule in RULES_OF_ONE_MODEL if rule not in RULES_OF_ONE_DISTRIBUTION
)


class TreeModelDrafter(Drafter):
    """Each draft model drafts a whole tree, level by level, with one forward a level.

    How children are drawn follows the acceptance rule; see children.py. The trees of several models
    (SpecInfer) hang below one root, and each node keeps the distribution it was drawn from.

    Args:
        models: the draft models. Neither they nor their configs are changed.
        spec: the tree that each of them drafts.

    Raises:
        ValueError: a rank too large for `expand_tree`, or too many nodes.
    """

    name = "model"

    def __init__(self, models: Sequence[Any], spec: TreeSpec) -> None:
        if max(spec.ranks) >= MAX_WIDTH:
            raise ValueError(f"ranks of tree must be below {MAX_WIDTH}, got {max(spec.ranks)}")
        if len(models) * spec.size > MAX_NODES:
            raise ValueError(
                f"tree must have at most {MAX_NODES} nodes over all draft models, "
                f"got {spec.size} for each of {len(models)}"
            )
        self.models = list(models)
        self.forest = Forest(spec, len(self.models))
        self.size, self.depth = self.forest.spec.size, spec.depth
        self.rules = RULES_OF_ONE_MODEL if len(self.models) == 1 else RULES_OF_SEVERAL_MODELS

    def start(self, context: DraftContext) -> None:
        """Check vocabularies and make empty caches.

        Raises:
            ValueError: a draft model that does not fit; see `DraftModel`.
        """
        self._context = context
        self._drafts = [DraftModel(model, context, "spec", tree=True) for model in self.models]
        self.relative_cost = sum(draft.relative_cost for draft in self._drafts)
        owners, numbers = np.array(self.forest.owners), np.array(self.forest.numbers)
        self._nodes = [np.flatnonzero(owners == copy) for copy in range(len(self.models))]
        # Only nodes with children are fed to their model; these are their places in its cache.
        fed = _feeding_order(self.forest.tree)
        self._fed = [np.where(owners == copy, fed[numbers], -1) for copy in range(len(self.models))]

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        batch_size, depth = len(limits), min(self.depth, int(limits.max()))
        spec = self.forest.spec.cut(depth)
        target = self._context.model.device
        tokens = torch.full((batch_size, spec.size), -1, dtype=torch.int64, device=target)
        draft_rows = np.zeros(spec.size, dtype=np.int32)
        levels: list[Children] = []
        offset = 0
        for draft, nodes in zip(self._drafts, self._nodes, strict=True):
            room = draft.room(history, np.minimum(limits, depth))
            if not room.any():
                continue
            tree = self.forest.tree.cut(int(room.max()))
            mine = nodes[: tree.size]
            drawn = draft_tree(draft, tree, mine, history)
            columns = torch.from_numpy(mine).to(target, non_blocking=True)
            depths = torch.from_numpy(np.array(tree.depths))[None].to(
                draft.device, non_blocking=True
            )
            drafted = torch.cat([level.tokens for level in drawn], dim=1)
            tokens[:, columns] = mask_below_limits(drafted, depths, room).to(target)
            # Row 0 of a model's distributions is the root's; those of its inner nodes follow.
            row_of = np.concatenate([[0], _feeding_order(tree) + 1])
            draft_rows[mine] = offset + row_of[np.array(tree.parents) + 1]
            offset += int(row_of.max()) + 1
            levels += drawn
        if not levels:
            return None
        parents = torch.from_numpy(np.array(spec.parents)).to(target, non_blocking=True)
        proposed = Draft(tokens, parents.expand(batch_size, -1), depth=depth)
        if reads_draft(self._context.rule):
            parts = [x.distribution for x in levels if x.distribution is not None]
            proposed.distribution = concat_distributions(parts, self._context.temperature, target)
            rows = torch.from_numpy(draft_rows).to(target, non_blocking=True)
            proposed.draft_rows = rows.expand(batch_size, -1)
        return proposed

    def commit(self, outcome: DraftOutcome) -> None:
        for draft, fed in zip(self._drafts, self._fed, strict=True):
            draft.keep(outcome.lengths, np.where(outcome.path >= 0, fed[outcome.path], -1))


def draft_tree(
    draft: DraftModel, spec: TreeSpec, numbers: NDArray[np.int64], history: History
) -> list[Children]:
    """Draw a whole tree level by level.

    Args:
        draft: the draft model; the nodes that have children are in its cache afterwards.
        spec: the tree.
        numbers: [N] of its nodes among all nodes of the round, for their noise.
        history: the committed tokens.

    Returns:
        The children that were drawn at depth 1, 2, ...
    """
    lengths, fed = history.lengths, _feeding_order(spec)
    start = torch.from_numpy(lengths.copy()).to(draft.device, non_blocking=True)
    parents, depths = np.array(spec.parents), np.array(spec.depths)
    inner = np.flatnonzero(fed >= 0)
    # The root is -1 in both numberings.
    above = torch.from_numpy(np.where(parents >= 0, fed[parents], -1)[inner])
    above = above.to(draft.device, non_blocking=True).expand(len(lengths), -1)
    logits = draft.catch_up(history)[:, None]
    levels: list[Children] = []
    count = 0
    for depth in range(1, spec.depth + 1):
        nodes = np.flatnonzero(depths == depth)
        widths = np.unique(parents[nodes], return_counts=True)[1]
        drawn = draw_children(draft, logits, start, depth, widths, numbers[nodes], spec, nodes)
        levels.append(drawn)
        here = inner[depths[inner] == depth]
        if len(here):
            count += len(here)
            columns = torch.from_numpy(here - nodes[0]).to(draft.device, non_blocking=True)
            logits = draft.feed(drawn.tokens[:, columns], lengths, above[:, :count])
    return levels


def _feeding_order(spec: TreeSpec) -> NDArray[np.int64]:
    """[N], number of each node among those that have children, -1 for leaves."""
    order = np.full(spec.size, -1, dtype=np.int64)
    inner = sorted({parent for parent in spec.parents if parent >= 0})
    order[inner] = np.arange(len(inner))
    return order
