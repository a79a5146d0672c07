"""Drafting a tree of fixed shape with one draft model, or with several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.base import (
    RULES_READING_DRAFT,
    DraftContext,
    History,
    TreeDraft,
    TreeDrafter,
    TreeOutcome,
    absent_beyond,
)
from specdec_hf.drafters.children import MAX_WIDTH, Children, draw_children
from specdec_hf.drafters.draft_model import DraftModel
from specdec_hf.trees.layouts import MAX_NODES, Forest, TreeSpec
from specdec_kernels import SampledDraft

SEVERAL_MODELS = (
    "multi_draft_wor", "multi_draft", "traversal", "target_only", "match", "greedy",
)  # fmt: skip
# These have no trial for siblings of different laws.
ONE_MODEL = (*SEVERAL_MODELS[:2], "top_k_plus_one", "k_seq", *SEVERAL_MODELS[2:])


class TreeModelDrafter(TreeDrafter):
    """Every draft model drafts the whole tree level by level, one forward a level.

    How children are drawn follows the acceptance rule; see children.py. With several models
    (SpecInfer) each node keeps the law it was drawn from.

    Args:
        models: the draft models. Neither they nor their configs are changed.
        spec: the tree that each of them drafts.

    Raises:
        ValueError: a rank too large, or too many nodes.
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
        self.rules = ONE_MODEL if len(self.models) == 1 else SEVERAL_MODELS

    def start(self, context: DraftContext) -> None:
        """Check vocabularies and make empty caches.

        Raises:
            ValueError: a draft model that does not fit; see `DraftModel`.
        """
        self._context = context
        self._drafts = [DraftModel(model, context, "spec") for model in self.models]
        owners, numbers = np.array(self.forest.owners), np.array(self.forest.numbers)
        self._nodes = [np.flatnonzero(owners == copy) for copy in range(len(self.models))]
        # Where in a model's cache each node of the whole tree goes: inner ones only are fed.
        fed = _feeding_order(self.forest.tree)
        self._fed = [np.where(owners == copy, fed[numbers], -1) for copy in range(len(self.models))]

    def propose(self, history: History, limits: NDArray[np.int64]) -> TreeDraft | None:
        rows, depth = len(limits), min(self.depth, int(limits.max()))
        spec = self.forest.spec.cut(depth)
        target = self._context.model.device
        tokens = torch.full((rows, spec.size), -1, dtype=torch.int64, device=target)
        draft_rows = np.zeros(spec.size, dtype=np.int32)
        laws: list[Children] = []
        offset = 0
        for draft, nodes in zip(self._drafts, self._nodes, strict=True):
            room = draft.room(history, np.minimum(limits, depth))
            if not room.any():
                continue
            tree = self.forest.tree.cut(int(room.max()))
            mine = nodes[: tree.size]
            levels = draft_tree(draft, tree, mine, history)
            where = torch.from_numpy(mine).to(target, non_blocking=True)
            drawn = torch.cat([made.tokens for made in levels], dim=1)
            depths = torch.tensor(tree.depths)[None].to(draft.device, non_blocking=True)
            tokens[:, where] = absent_beyond(drawn, depths, room).to(target)
            inner = np.concatenate([[0], _feeding_order(tree) + 1])  # the root's law comes first
            draft_rows[mine] = offset + inner[np.array(tree.parents) + 1]
            offset += int(inner.max()) + 1
            laws += levels
        if not laws:
            return None
        parents = torch.tensor(spec.parents).to(target, non_blocking=True).expand(rows, -1)
        made = TreeDraft(tokens, parents, depth)
        if self._context.rule in RULES_READING_DRAFT:
            made.law = SampledDraft(
                torch.cat([x.logits.to(target) for x in laws], dim=1),
                torch.cat([x.logsumexp.to(target) for x in laws], dim=1),
                torch.cat([x.threshold.to(target) for x in laws], dim=1),
                self._context.temperature,
            )
            made.draft_rows = (
                torch.from_numpy(draft_rows).to(target, non_blocking=True).expand(rows, -1)
            )
        return made

    def commit(self, lengths: NDArray[np.int64], outcome: TreeOutcome | None) -> None:
        for draft, fed in zip(self._drafts, self._fed, strict=True):
            if outcome is None:
                draft.truncate(lengths)
            else:
                draft.keep(lengths, np.where(outcome.path >= 0, fed[outcome.path], -1))


def draft_tree(
    draft: DraftModel, spec: TreeSpec, numbers: NDArray[np.int64], history: History
) -> list[Children]:
    """Draw a whole tree level by level; the draws of each level.

    Args:
        draft: the draft model; the inner nodes are in its cache afterwards.
        spec: the tree.
        numbers: [N] of its nodes among all that the round drafts, for their noise.
        history: the rows.
    """
    lengths, fed = history.lengths, _feeding_order(spec)
    start = torch.from_numpy(lengths.copy()).to(draft.device, non_blocking=True)
    parents, depths = np.array(spec.parents), np.array(spec.depths)
    inner = np.flatnonzero(fed >= 0)
    # -1 stays -1: fed[-1] would be the last node's.
    above = torch.from_numpy(np.where(parents >= 0, fed[parents], -1)[inner])
    above = above.to(draft.device, non_blocking=True).expand(len(lengths), -1)
    logits = draft.catch_up(history)[:, None]
    levels: list[Children] = []
    count = 0
    for depth in range(1, spec.depth + 1):
        nodes = np.flatnonzero(depths == depth)
        widths = np.unique(parents[nodes], return_counts=True)[1]
        made = draw_children(draft, logits, start, depth, widths, numbers[nodes], spec, nodes)
        levels.append(made)
        here = inner[depths[inner] == depth]
        if len(here):
            count += len(here)
            columns = torch.from_numpy(here - nodes[0]).to(draft.device, non_blocking=True)
            logits = draft.feed(made.tokens[:, columns], lengths, above[:, :count])
    return levels


def _feeding_order(spec: TreeSpec) -> NDArray[np.int64]:
    """[N], the number of each node among those with children, -1 for leaves."""
    order = np.full(spec.size, -1, dtype=np.int64)
    inner = sorted({parent for parent in spec.parents if parent >= 0})
    order[inner] = np.arange(len(inner))
    return order
