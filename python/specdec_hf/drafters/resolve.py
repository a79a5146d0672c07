"""The drafter of a call, from what `generate` accepts as ``drafter`` and ``tree``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec_hf import plugins
from specdec_hf.arguments import did_you_mean, shown
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.drafting.registry import drafters, entry_named, make_drafter, usages
from specdec_hf.request.inputs import (
    RULE,
    check_language_model,
    is_language_model,
)

if TYPE_CHECKING:
    from specdec_hf.trees import Layout

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
    if any(map(_may_be_a_folder, drafter if isinstance(drafter, list | tuple) else [drafter])):
        from specdec_hf.drafters.folders import read_folders  # noqa: PLC0415  # reads models

        drafter = read_folders(drafter, model, tokenizer)
    if layout is not None:
        from specdec_hf.drafters.layouts import tree_drafter  # noqa: PLC0415  # rarely asked for

        given = drafter if isinstance(drafter, list | tuple) else [drafter]
        resolved = [made for one in given if (made := _one_drafter(one, model)) is not None]
        if not resolved or len(resolved) < len(given):
            raise ValueError(f"drafter must be given with tree, got {_named(drafter)}")
        return tree_drafter(resolved, layout, _named(drafter))
    if isinstance(drafter, list | tuple):
        return _cascade(drafter, model)
    return _one_drafter(drafter, model)


def _may_be_a_folder(drafter: Any) -> bool:
    named = isinstance(drafter, str) and entry_named(drafter) is not None
    return isinstance(drafter, str | os.PathLike) and not named


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
        from specdec_hf.drafters.model import ModelDrafter  # noqa: PLC0415  # where there is one

        return ModelDrafter(drafter)
    made = make_drafter(drafter)
    if made is None:
        hint = did_you_mean(drafter, drafters()) or f"; drafters with a name are {usages()}"
        raise ValueError(f"{_RULE}, got {shown(drafter)}{hint}")
    return _one_drafter(made, target)
