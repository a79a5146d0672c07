"""The drafter of a layout of trees that the caller gives."""

from __future__ import annotations

from typing import Any

from specdec_hf.drafters.composed import ComposedDrafter
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafters.tree_model import ModelTreeDrafter, TreeModelDrafter
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.trees import EagleTree, Layout, TrieTree


def tree_drafter(resolved: list[Drafter], layout: Layout, named: str) -> Drafter:
    """The drafter whose trees have a layout.

    Args:
        resolved: what drafts, made for the target.
        layout: of the trees.
        named: the argument ``drafter``, for messages.

    Raises:
        ValueError: they cannot draft it.
    """
    if isinstance(layout, TrieTree):
        return TrieDrafter(resolved, layout)
    drafters: list[Any] = []
    for one in resolved:
        if one.size:
            raise ValueError(
                f"tree must be a TrieTree or None with drafter {one.name}, which drafts trees of "
                f"its own, got {layout}"
            )
        if isinstance(one, ComposedDrafter) and one.needs.target_forward:
            raise ValueError(
                "tree must be a TrieTree or None with a cascade of drafter sparse_cache, which "
                f"drafts chains, got {layout}"
            )
        drafters.append(one)
    models = [one for one in drafters if isinstance(one, ModelDrafter) and one.is_model]
    if isinstance(layout, EagleTree):
        if len(models) != 1 or len(drafters) != 1:
            raise ValueError(f"drafter must be one draft model with tree=EagleTree, got {named}")
        if models[0].sampling:
            raise ValueError(
                "drafter must have no sampling parameters of its own with tree=EagleTree, which "
                f"draws nothing, got {dict(models[0].sampling)}"
            )
        return ModelTreeDrafter(models[0].model, layout, models[0].draft_weights)
    if all(one.is_model for one in drafters):
        return TreeModelDrafter(drafters, layout)
    if len(drafters) == 1 and drafters[0].several:
        # With as many leaves, levels and nodes: a copying drafter cannot fill a fixed shape.
        return TrieDrafter(drafters, TrieTree(layout.leaves, layout.depth, layout.size))
    raise ValueError(
        "drafter must be a draft model, a VerticalCascade, a list of them, or one that drafts "
        "several chains, such as 'prompt_lookup', with tree=TreeSpec (TrieTree takes any), got "
        f"{named}"
    )
