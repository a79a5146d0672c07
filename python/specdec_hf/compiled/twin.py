"""A second set of a model's modules over the same weights.

What is compiled must not stay in the user's model. A twin has the same classes, configuration,
parameters and buffers, but modules of its own, in which linear layers and the forwards of the
decoder's layers are replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from specdec_hf.cache.split_model import layer_list_name, unknown_structure
from specdec_hf.compiled.layers import is_library_hook
from specdec_hf.compiled.packed_linear import PackedLinear, unpacked_reason

# Transformers sets them on a model in its first forward that collects hidden states or attentions,
# and in calls with a static cache. Neither changes what a forward computes.
BOOKKEEPING = frozenset({"_output_capturing_hooks_installed", "_previous_max_cache_length"})


def twin_reason(model: Any) -> str | None:
    """Why no twin of a model can be made, or None."""
    reason = unknown_structure(model)
    if reason is not None:
        return reason
    for name, module in model.named_modules():
        if "forward" in vars(module) or hasattr(module, "_hf_hook"):
            return f"the forward of its module {name!r} was replaced"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(is_library_hook(hook) for hook in hooks):
            return f"its module {name!r} has a hook"
    return None


def structure_of(model: Any) -> tuple[Any, ...]:
    """What a twin takes over from a model: it serves the model while this is the same.

    The values of parameters and buffers are left out, because a twin shares those.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    configs = {id(c): c for _, m in modules if (c := vars(m).get("config")) is not None}
    return (
        tuple((number, _plain_values(config)) for number, config in configs.items()),
        tuple(
            # A twin holds the dict of parameters, so that no other module has one of this number.
            (name, type(module), type(module).forward, id(module._parameters),
             _plain_values(module), _kinds(module._parameters), _kinds(module._buffers))
            for name, module in modules
        ),
    )  # fmt: skip


def _plain_values(owner: Any) -> tuple[Any, ...]:
    plain = (bool, int, float, str, type(None), torch.dtype, torch.device)
    return tuple(
        # repr() tells True from 1, and NaN is equal to itself.
        (name, repr(value))
        for name, value in vars(owner).items()
        if isinstance(value, plain) and name != "training" and name not in BOOKKEEPING
    )


def _kinds(tensors: Mapping[str, torch.Tensor | None]) -> tuple[Any, ...]:
    return tuple(
        (name, None if x is None else (type(x), x.shape, x.dtype, x.device, x.stride()))
        for name, x in tensors.items()
    )


def make_twin(
    model: Any, replace: Callable[[int, torch.nn.Module], torch.nn.Module]
) -> tuple[Any, list[PackedLinear]]:
    """A twin of a model, and its packed layers.

    Args:
        model: the model; it is not changed.
        replace: gives what takes the place of a decoder layer, from its number and its copy.
    """
    packed: dict[int, PackedLinear] = {}
    twin = packed_copy(model, packed)
    base = twin.base_model
    layers = base._modules[layer_list_name(model)]
    base._modules[layer_list_name(model)] = torch.nn.ModuleList(
        replace(i, layer) for i, layer in enumerate(layers)
    )
    return twin, list(packed.values())


def packed_copy(module: torch.nn.Module, packed: dict[int, PackedLinear]) -> Any:
    """A copy of a module over the same weights, whose linear layers are packed where they can be.

    Args:
        module: it is not changed.
        packed: the packed layers so far, by the number of the layer that each replaces.
    """
    if unpacked_reason(module) is None:
        if id(module) not in packed:
            packed[id(module)] = PackedLinear(module)  # type: ignore[arg-type]
        return packed[id(module)]
    twin = copy.copy(module)
    twin._modules = {
        name: None if child is None else packed_copy(child, packed)
        for name, child in module._modules.items()
    }
    # Transformers puts hooks on modules while it collects hidden states.
    twin._forward_hooks = type(module._forward_hooks)(module._forward_hooks)
    twin._forward_pre_hooks = type(module._forward_pre_hooks)(module._forward_pre_hooks)
    return twin
