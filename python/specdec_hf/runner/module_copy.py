"""A second set of a model's modules over the same weights, in the place of which other ones run.

What is packed or compiled must not stay in the user's model. A copy has the same classes,
configuration, parameters and buffers, but modules of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from specdec_hf.runner.protocol import rope_types

# What to do with the adapters of PEFT.
MERGE = "merge its adapters to pack them, with merge_and_unload() of PEFT"
# What is compared by its value.
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def is_library_hook(hook: Any) -> bool:
    """Whether Transformers put a hook on a module, which it does to collect outputs."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


# Transformers sets them on a model in its first forward that collects hidden states or attentions,
# and in calls with a static cache. They do not change what a forward computes.
BOOKKEEPING = frozenset({
    "_output_capturing_hooks_installed", "_previous_max_cache_length", "_last_compile_config",
    "_compiled_call", "generation_config",
})  # fmt: skip
# Of PyTorch, for parameters, hooks and the mode.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def copy_reason(model: Any) -> str | None:
    """Why no copy of a model can be made, or None."""
    if not isinstance(model, PreTrainedModel):
        return f"it is a wrapper{f'; {MERGE}' if hasattr(model, 'merge_and_unload') else ''}"
    if "dynamic" in rope_types(model):
        return "its rotary embedding 'dynamic' goes by the lengths of earlier texts"
    for name, module in model.named_modules():
        if "forward" in vars(module) or hasattr(module, "_hf_hook"):
            return f"the forward of its module {name!r} was replaced"
        if is_parametrized(module):  # its class is made for it alone, and refuses to be copied
            return f"its module {name!r} computes its weights from others"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(is_library_hook(hook) for hook in hooks):
            return f"its module {name!r} has a hook"
    return None


def structure_of(model: Any) -> tuple[Any, ...]:
    """What a copy takes over from a model: it serves the model while this is the same.

    The values of parameters and buffers are left out, because a copy shares those, and tensors that
    are plain attributes, because forwards of some models keep what they have computed in them.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    # Some modules call a number of it their configuration.
    configs = {id(c): c for _, m in modules if hasattr(c := vars(m).get("config"), "__dict__")}
    return (
        tuple((number, _attributes(config)) for number, config in configs.items()),
        tuple(
            (name, type(module), type(module).forward, id(module._parameters),
             _attributes(module), _kinds(module._parameters), _kinds(module._buffers))
            for name, module in modules
        ),
    )  # fmt: skip


def _attributes(owner: Any) -> tuple[Any, ...]:
    return tuple(
        # repr() tells True from 1, and NaN is equal to itself. A copy holds all other objects, such
        # as functions and the dict of parameters, so that no others have their numbers, and shares
        # what is in them.
        (name, repr(value) if isinstance(value, PLAIN) else id(value))
        for name, value in vars(owner).items()
        if name not in _OF_EVERY_MODULE
        and name not in BOOKKEEPING
        and not isinstance(value, torch.Tensor | None)
    )


def _kinds(tensors: Mapping[str, torch.Tensor | None]) -> tuple[Any, ...]:
    return tuple(
        (name, None if x is None else (type(x), x.shape, x.dtype, x.device, x.stride()))
        for name, x in tensors.items()
    )


def copied(module: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of a module and of those inside, over the same parameters and buffers.

    Args:
        module: it is not changed.
        replace: gives what takes the place of a module, or None to copy it.
    """
    other = replace(module)
    if other is not None:
        return other
    copied_module = copy.copy(module)
    copied_module._modules = {
        name: None if child is None else copied(child, replace)
        for name, child in module._modules.items()
    }
    # Transformers puts hooks on modules while it collects hidden states.
    copied_module._forward_hooks = type(module._forward_hooks)(module._forward_hooks)
    copied_module._forward_pre_hooks = type(module._forward_pre_hooks)(module._forward_pre_hooks)
    return copied_module
