"""A second set of a model's modules over the same weights.

What is compiled must not stay in the user's model. A twin has the same classes, configuration,
parameters and buffers, but modules of its own, in which linear layers, the forwards of the
decoder's layers, and attention on a CPU are replaced.

All layers of a model run the same graph: what tells them apart, their weights and their buffers, is
input. Widths, slots and batch sizes are symbols of the graph, and no Python number that changes
from round to round reaches it. A graph is made for one token and one for several, for one sequence
and for a batch, and for each type of layer that a model has.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec_hf.runner.compiled.packed_linear import PackedLinear, unpacked_reason
from specdec_hf.runner.split_model import layer_list_name, unknown_structure

# What tells one module from another beside its tensors.
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
NAME = "specdec_grouped_sdpa"


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As Transformers' own attention of kind "sdpa", but keys and values of a group are read once.

    Transformers repeats them for every head of queries wherever a forward has more than one token,
    and where it is compiled also with one. On a CPU the copies and the attention over them take up
    to six times as long. Here the tokens of all heads of a group become the rows of one head.

    Args:
        module: with ``num_key_value_groups`` heads of queries to one of keys.
        query: [B, H, n, D].
        key, value: [B, H / groups, S, D].
        attention_mask: [B, 1, n, S]; others, and none, take Transformers' own attention, as do
            other arguments that change what is computed.
    """
    own = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache"))
    if own or attention_mask is None or attention_mask.shape[1] != 1:
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return out
    groups, (batch_size, _, size, _) = module.num_key_value_groups, query.shape
    rows = attention_mask.expand(batch_size, 1, size, -1)
    attended = scaled_dot_product_attention(
        query.reshape(batch_size, key.shape[1], groups * size, -1),
        key,
        value,
        attn_mask=rows[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3),
        dropout_p=dropout,
        scale=scaling,
    )
    return attended.reshape(batch_size, -1, size, value.shape[-1]).transpose(
        1, 2
    ).contiguous(), None


AttentionInterface.register(NAME, attend)


def _only_looks_up(forward: Any) -> bool:
    """Whether a forward reads the name of its attention only once, to look it up."""
    try:
        return inspect.getsource(forward).count("_attn_implementation") == 1
    except OSError:  # made at run time
        return False


def share_reads(module: Any) -> None:
    """Let a module of a twin attend as `attend` does, if it is one that gains by it.

    Args:
        module: changed in place: it gets a configuration of its own.
    """
    config = vars(module).get("config")
    if getattr(module, "num_key_value_groups", 1) == 1 or config is None:
        return
    weights = next(module.parameters(), None)
    functions = getattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS", {})
    if (
        weights is not None
        and weights.device.type == "cpu"
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and _only_looks_up(type(module).forward)
        # A model may put a function of its own in the place of the common one.
        and functions.get("sdpa") is sdpa_attention_forward
    ):
        module.config = copy.copy(config)
        module.config._attn_implementation_internal = NAME


LayerForward = Callable[..., Any]


@dataclass(eq=False)
class Place:
    """Where the tokens of one forward go, for all layers.

    Attributes:
        rows: [B, 1], number of each sequence.
        slots: [B, n], slot of each token; all are those of the sequence itself.
        visible: [S], whose length is the number of slots that the forward sees.
    """

    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    slots: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    visible: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


class LayerBuffers:
    """The buffers [B, H, S, D] of one layer, in the place of the whole cache."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.keys: Any = None
        self.values: Any = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values [B, H, n, D] of a forward; those that it sees."""
        rows, slots, visible = self.place.rows, self.place.slots, self.place.visible.shape[0]
        self.keys[rows, :, slots] = key_states.transpose(1, 2)
        self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError("a layer reads the cache's length, which changes in every round")


class LayerGraphs:
    """Runs decoder layers of one model, with one compiled function for all that are alike.

    Args:
        dtype: of the model.
        backend: of ``torch.compile``.
    """

    def __init__(self, dtype: torch.dtype, backend: str) -> None:
        self._options: dict[str, Any] = {"guard_filter_fn": _guards_of_inputs}
        if backend == "inductor" and dtype != torch.float32:
            # Fused 16-bit arithmetic otherwise rounds less often than eager kernels do.
            self._options["emulate_precision_casts"] = True
        self._backend = backend
        self._made: dict[tuple[Any, ...], LayerForward] = {}

    def of(self, layer: Any) -> LayerForward:
        """The function that runs a layer."""
        key = _likeness(layer)
        if key not in self._made:
            # Graphs are kept with the code object, which two functions must not share.
            code = _run.__code__.replace(co_name="run_layer")
            self._made[key] = torch.compile(
                types.FunctionType(code, globals(), "run_layer"), fullgraph=True, dynamic=True,
                backend=self._backend, options=dict(self._options),
            )  # fmt: skip
        return self._made[key]


def _run(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _guards_of_inputs(guards: Any) -> list[bool]:
    """Which conditions of a graph are checked in every forward: all but those on the layer.

    A layer of a twin never changes, and one that differs has a function of its own.
    """
    return [not guard.name.startswith("L['layer']") for guard in guards]


def _likeness(layer: Any) -> tuple[Any, ...]:
    """What two layers have in common that may share a graph: all but the values of tensors."""
    return tuple(
        (
            name, type(module),
            tuple(sorted((k, repr(v)) for k, v in vars(module).items() if isinstance(v, _PLAIN))),
            tuple((k, None if p is None else (p.shape, p.dtype, p.device, p.stride()))
                  for k, p in (*module._parameters.items(), *module._buffers.items())),
        )
        for name, module in layer.named_modules()
    )  # fmt: skip


def replaced_layer(layer: Any, buffers: LayerBuffers, graphs: LayerGraphs) -> Any:
    """A decoder layer of a twin that runs compiled over its own buffers."""
    for module in layer.modules():
        if "layer_idx" in vars(module):
            module.layer_idx = 0  # a number of its own would need a graph of its own
        share_reads(module)
        # Transformers collects outputs by hooks, which cannot be traced. Those of the whole layer
        # run outside of the graph.
        hooks = module._forward_hooks
        for number in [n for n, h in hooks.items() if is_library_hook(h)]:
            if module is not layer:
                del hooks[number]
    run = graphs.of(layer)
    outer = copy.copy(layer)
    outer._modules = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        args = tuple(buffers if isinstance(x, Cache) else x for x in args)
        # Hidden states are collected outside, and the flag would need a graph of its own.
        kwargs.pop("output_hidden_states", None)
        for name, value in kwargs.items():
            if isinstance(value, Cache):
                kwargs[name] = buffers
        return run(layer, *args, **kwargs)

    outer.forward = forward
    return outer


def is_library_hook(hook: Any) -> bool:
    """Whether Transformers put a hook on a module, which it does to collect outputs."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


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
    return tuple(
        # repr() tells True from 1, and NaN is equal to itself.
        (name, repr(value))
        for name, value in vars(owner).items()
        if isinstance(value, _PLAIN) and name != "training" and name not in BOOKKEEPING
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
