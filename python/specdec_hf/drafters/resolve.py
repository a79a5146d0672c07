"""Drafters from what `generate` accepts as ``drafter`` and ``tree``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_hf.drafters.base import Drafter, TreeDrafter
from specdec_hf.drafters.eagle import EagleDrafter
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafters.prompt_lookup import PromptLookupDrafter
from specdec_hf.drafters.tree_model import TreeModelDrafter
from specdec_hf.drafters.trie import TrieDrafter
from specdec_hf.trees.layouts import EagleTree, Layout, TreeSpec, TrieTree


def _named(drafter: Any) -> str:
    """A model prints its whole architecture; its type says enough."""
    if isinstance(drafter, list | tuple):
        return f"[{', '.join(map(_named, drafter))}]"
    return type(drafter).__name__ if isinstance(drafter, torch.nn.Module) else repr(drafter)


def resolve_drafter(drafter: Any) -> Drafter | None:
    """What drafts chains.

    Raises:
        ValueError: not a drafter.
    """
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if drafter == "prompt_lookup":
        return PromptLookupDrafter()
    if isinstance(drafter, PreTrainedModel):
        return ModelDrafter(drafter)
    several = "; several drafters need tree" if isinstance(drafter, list | tuple) else ""
    raise ValueError(
        "drafter must be None, 'prompt_lookup', a PreTrainedModel or a Drafter, "
        f"got {_named(drafter)}{several}"
    )


def resolve_tree_drafter(drafter: Any, layout: Layout) -> TreeDrafter:
    """What drafts trees of a layout.

    Raises:
        ValueError: no drafter, or one that cannot draft this layout.
    """
    given = list(drafter) if isinstance(drafter, list | tuple) else [drafter]
    drafters = [made for made in map(resolve_drafter, given) if made is not None]
    if not drafters or len(drafters) < len(given):
        raise ValueError(f"drafter must be given with tree, got {_named(drafter)}")
    if isinstance(layout, TrieTree):
        return TrieDrafter(drafters, layout)
    models = [made.model for made in drafters if isinstance(made, ModelDrafter)]
    if isinstance(layout, EagleTree):
        if len(models) != 1 or len(drafters) != 1:
            raise ValueError(
                f"drafter must be one draft model with tree=EagleTree, got {_named(drafter)}"
            )
        return EagleDrafter(models[0], layout)
    if len(models) == len(drafters):
        return TreeModelDrafter(models, layout)
    if len(drafters) == 1 and isinstance(drafters[0], PromptLookupDrafter):
        return TrieDrafter(drafters, _room_of(layout))
    raise ValueError(
        "drafter must be 'prompt_lookup', a draft model or a list of them with tree=TreeSpec "
        f"(TrieTree takes any), got {_named(drafter)}"
    )


def _room_of(spec: TreeSpec) -> TrieTree:
    """Prompt lookup fills a tree with what it finds: as many sequences, levels and nodes."""
    return TrieTree(spec.leaves, spec.depth, spec.size)
