"""A second set of a model's modules over the same weights.

What is compiled must not stay in the user's model. A twin has the same classes, configuration,
parameters and buffers, but modules of its own, in which linear layers and the forwards of the
decoder's layers are replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from specdec_hf.cache.split_model import layer_list_name, unknown_structure
from specdec_hf.compiled.packed_linear import PackedLinear, unpacked_reason


def twin_reason(model: Any) -> str | None:
    """Why no twin of a model can be made, or None."""
    reason = unknown_structure(model)
    if reason is not None:
        return reason
    for name, module in model.named_modules():
        if "forward" in vars(module) or hasattr(module, "_hf_hook"):
            return f"the forward of its module {name!r} was replaced"
    return None


def make_twin(
    model: Any, replace: Callable[[int, torch.nn.Module], torch.nn.Module]
) -> tuple[Any, list[PackedLinear]]:
    """A twin of a model, and its packed layers.

    Args:
        model: the model; it is not changed.
        replace: gives what takes the place of a decoder layer, from its number and its copy.
    """
    packed: dict[int, PackedLinear] = {}
    twin = _copied(model, packed)
    base = twin.base_model
    layers = base._modules[layer_list_name(model)]
    base._modules[layer_list_name(model)] = torch.nn.ModuleList(
        replace(i, layer) for i, layer in enumerate(layers)
    )
    return twin, list(packed.values())


def _copied(module: torch.nn.Module, packed: dict[int, PackedLinear]) -> Any:
    if unpacked_reason(module) is None:
        if id(module) not in packed:
            packed[id(module)] = PackedLinear(module)  # type: ignore[arg-type]
        return packed[id(module)]
    twin = copy.copy(module)
    twin._modules = {
        name: None if child is None else _copied(child, packed)
        for name, child in module._modules.items()
    }
    # Transformers puts hooks on modules while it collects hidden states.
    twin._forward_hooks = type(module._forward_hooks)(module._forward_hooks)
    twin._forward_pre_hooks = type(module._forward_pre_hooks)(module._forward_pre_hooks)
    return twin
