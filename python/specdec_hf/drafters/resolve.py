"""The drafter of a call, from what `generate` accepts as ``drafter`` and ``tree``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from specdec_hf import plugins
from specdec_hf.arguments import did_you_mean, shown
from specdec_hf.drafters.composed import ComposedDrafter
from specdec_hf.drafters.folders import read_folders
from specdec_hf.drafters.growing_tree import ModelTreeDrafter
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.drafting.registry import drafters, make_drafter, usages
from specdec_hf.request.inputs import (
    RULE,
    check_language_model,
    is_language_model,
)
from specdec_hf.trees import EagleTree, Layout, TrieTree

_RULE = f"drafter must be None, the name of a drafter, a folder, a Drafter or {RULE}"


def _named(drafter: Any) -> str:
    """A drafter in a message: by its name, and a model by its type, since its repr is long."""
    if isinstance(drafter, list | tuple):
        return f"[{', '.join(map(_named, drafter))}]"
    if isinstance(drafter, Drafter):
        return drafter.name
    return type(drafter).__name__ if isinstance(drafter, torch.nn.Module) else repr(drafter)


def check_drafter_types(drafter: Any) -> None:
    """Raises TypeError for an argument ``drafter`` that neither is a drafter nor lists some."""
    for one in drafter if isinstance(drafter, list | tuple) else [drafter]:
        fits = one is None or isinstance(one, str | os.PathLike | Drafter) or is_language_model(one)
        if not fits:
            raise TypeError(f"{_RULE}, got {_named(one)}")


def resolve_drafter(
    drafter: Any, layout: Layout | None, model: Any, tokenizer: Any = None
) -> Drafter | None:
    """The drafter of a call; None for plain decoding.

    Args:
        drafter: the argument of `generate`.
        layout: of the trees to draft; None for chains, and for drafters with trees of their own.
        model: the target, for which drafters are made; see `Drafter.for_target`.
        tokenizer: as in `read_folders`.

    Raises:
        TypeError: not a drafter.
        ValueError: an unknown name, several drafters without a layout, or a drafter that cannot
            draft the layout or be made for the target.
        OSError: a file of a named drafter that cannot be read.
    """
    drafter = read_folders(drafter, model, tokenizer)
    if layout is not None:
        return _tree_drafter(drafter, layout, model)
    if isinstance(drafter, list | tuple):
        return _cascade(drafter, model)
    return _one_drafter(drafter, model)


def _cascade(drafters: Sequence[Any], target: Any) -> Drafter:
    """Draft models from large to small, each of which drafts for the one before it."""
    models = [_one_drafter(one, target) if isinstance(one, str) else one for one in drafters[:-1]]
    lead = all(getattr(one, "leads_cascade", False) or is_language_model(one) for one in models)
    above = models[-1] if models and is_language_model(models[-1]) else target
    last = _one_drafter(drafters[-1], above) if drafters else None
    if not models or not lead or last is None or last.size:
        raise ValueError(
            f"{_RULE}, got {_named(drafters)}; several drafters need tree, unless they are draft "
            "models from large to small, the last of which may be a Drafter, or sparse_cache "
            "before them"
        )
    cascade = plugins.load("vertical_cascade")
    for model in reversed(models):
        last = cascade(model, last)
    return last


def _one_drafter(drafter: Any, target: Any) -> Drafter | None:
    if drafter is None:
        return None
    if isinstance(drafter, Drafter):
        return drafter.for_target(target)
    check_drafter_types(drafter)
    if not isinstance(drafter, str):
        check_language_model("drafter", drafter)
        return ModelDrafter(drafter)
    made = make_drafter(drafter)
    if made is None:
        hint = did_you_mean(drafter, drafters()) or f"; drafters with a name are {usages()}"
        raise ValueError(f"{_RULE}, got {shown(drafter)}{hint}")
    return _one_drafter(made, target)


def _tree_drafter(drafter: Any, layout: Layout, target: Any) -> Drafter:
    given = list(drafter) if isinstance(drafter, list | tuple) else [drafter]
    resolved = [made for one in given if (made := _one_drafter(one, target)) is not None]
    if not resolved or len(resolved) < len(given):
        raise ValueError(f"drafter must be given with tree, got {_named(drafter)}")
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
            raise ValueError(
                f"drafter must be one draft model with tree=EagleTree, got {_named(drafter)}"
            )
        if models[0].sampling:
            raise ValueError(
                "drafter must have no sampling parameters of its own with tree=EagleTree, which "
                f"draws nothing, got {dict(models[0].sampling)}"
            )
        return ModelTreeDrafter(models[0].model, layout)
    if all(one.is_model for one in drafters):
        from specdec_hf.drafters.tree_model import TreeModelDrafter  # noqa: PLC0415  # as above

        return TreeModelDrafter(drafters, layout)
    if len(drafters) == 1 and drafters[0].several:
        # With as many leaves, levels and nodes: a copying drafter cannot fill a fixed shape.
        return TrieDrafter(drafters, TrieTree(layout.leaves, layout.depth, layout.size))
    raise ValueError(
        "drafter must be a draft model, a VerticalCascade, a list of them, or one that drafts "
        "several chains, such as 'prompt_lookup', with tree=TreeSpec (TrieTree takes any), got "
        f"{_named(drafter)}"
    )
