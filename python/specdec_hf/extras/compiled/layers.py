"""Compiled decoder layers of a copy, which run over the buffers of a `SpecCache`.

All layers of a model run the same graph: what tells them apart, their weights and their buffers, is
input. Widths, slots and batch sizes are symbols of the graph, and no Python number that changes
from round to round reaches it. A graph is made for one token and one for several, for one sequence
and for a batch, and for each type of layer that a model has.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from specdec_hf.extras.compiled.attention import NAME as FOLDED
from specdec_hf.runner.module_copy import PLAIN, copied, is_library_hook
from specdec_hf.runner.packed.attention import attend_by
from specdec_hf.runner.structure import layer_list_name

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

    A layer of a copy never changes, and one that differs has a function of its own.
    """
    return [not guard.name.startswith("L['layer']") for guard in guards]


def _likeness(layer: Any) -> tuple[Any, ...]:
    """What two layers have in common that may share a graph: all but the values of tensors."""
    return tuple(
        (
            name, type(module),
            tuple(sorted((k, repr(v)) for k, v in vars(module).items() if isinstance(v, PLAIN))),
            tuple((k, None if p is None else (p.shape, p.dtype, p.device, p.stride()))
                  for k, p in (*module._parameters.items(), *module._buffers.items())),
        )
        for name, module in layer.named_modules()
    )  # fmt: skip


def replaced_layer(layer: Any, buffers: LayerBuffers, graphs: LayerGraphs) -> Any:
    """A decoder layer of a copy that runs compiled over its own buffers."""
    for module in layer.modules():
        attend_by(module, FOLDED)
        if "layer_idx" in vars(module):
            module.layer_idx = 0  # a number of its own would need a graph of its own
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


def compiled_copy(model: Any, replace: Callable[[int, torch.nn.Module], torch.nn.Module]) -> Any:
    """A copy of a model with other decoder layers.

    Args:
        model: the model; it is not changed.
        replace: gives what takes the place of a decoder layer, from its number and its copy.
    """
    made = copied(model, lambda module: None)
    base, name = made.base_model, layer_list_name(model)
    base._modules[name] = torch.nn.ModuleList(
        replace(i, layer) for i, layer in enumerate(base._modules[name])
    )
    return made.eval()
