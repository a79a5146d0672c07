"""The compiled forward of one decoder layer, and the part of the cache that it reads and writes.

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


def compiled_layer_forward(dtype: torch.dtype, backend: str) -> LayerForward:
    """A function that runs a decoder layer, compiled once for all layers of a model."""

    def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return type(layer).forward(layer, *args, **kwargs)

    # Graphs are kept with the code object, which two models must not share.
    run = types.FunctionType(run.__code__.replace(co_name="run_layer"), globals(), "run_layer")
    options: dict[str, Any] = {}
    if backend == "inductor" and dtype != torch.float32:
        # Fused 16-bit arithmetic otherwise rounds less often than eager kernels do.
        options["emulate_precision_casts"] = True
    return torch.compile(
        run, fullgraph=True, dynamic=True, backend=backend, options=options or None
    )


def replaced_layer(layer: Any, buffers: LayerBuffers, run: LayerForward) -> Any:
    """A decoder layer of a twin that runs compiled over its own buffers."""
    for module in layer.modules():
        if "layer_idx" in vars(module):
            module.layer_idx = 0  # a number of its own would need a graph of its own
        # Transformers collects outputs by hooks, which cannot be traced. Those of the whole layer
        # run outside of the graph.
        hooks = module._forward_hooks
        for number in [n for n, h in hooks.items() if _is_library_hook(h)]:
            if module is not layer:
                del hooks[number]
    outer = copy.copy(layer)
    outer._modules = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        args = tuple(buffers if isinstance(x, Cache) else x for x in args)
        for name, value in kwargs.items():
            if isinstance(value, Cache):
                kwargs[name] = buffers
        return run(layer, *args, **kwargs)

    outer.forward = forward
    return outer


def _is_library_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")
