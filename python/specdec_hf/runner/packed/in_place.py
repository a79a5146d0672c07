"""Packing a model in place, for whoever has no memory for two copies of its weights."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specdec_hf.arguments import shown
from specdec_hf.runner.fit import record_of
from specdec_hf.runner.packed.linear import unpacked_reason
from specdec_hf.runner.packed.twin import OnlyPacked, PackedStats, is_other_linear, resident_bytes
from specdec_hf.runner.twin import twin_reason
from specdec_kernels import pack_linear, packed_linear


class PackedInPlace(OnlyPacked):
    """A linear layer that holds its weight in panels alone.

    Args:
        layer: whose weight is packed.
        tied: whether another module needs the weight, which is then kept too.
    """

    def __init__(self, layer: nn.Linear, *, tied: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self._tied = layer.weight if tied else None
        self.packed_weight = pack_linear(layer.weight.detach())

    @property
    def nbytes(self) -> int:
        """Of the panels."""
        return self.packed_weight.panels.nbytes

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]: the tied weight, or a new tensor."""
        if self._tied is not None:
            return self._tied
        panels, inputs, outputs = self.packed_weight
        if panels.ndim == 4:  # pairs of inputs
            panels = panels.transpose(2, 3).flatten(1, 2)
        return panels.transpose(1, 2).flatten(0, 1)[:outputs, :inputs]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.packed_weight.panels.dtype or torch.is_autocast_enabled("cpu"):
            return linear(x, self.weight, self.bias)
        return packed_linear(x, self.packed_weight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        panels = self.packed_weight.panels
        other = fn(panels[:0])
        if (other.dtype, other.device) != (panels.dtype, panels.device):
            raise RuntimeError(
                f"a model after pack_ must stay in {panels.dtype} on the CPU, got {other.dtype} on "
                f"{other.device}: load it again"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise RuntimeError(
            f"the weight of {prefix.rstrip('.')!r} cannot be saved after pack_, which keeps it in "
            "the layout of this processor: save the model before, or load it again"
        )


def pack_(model: Any) -> PackedStats:
    """Pack the linear layers of a model in place, so that no second copy of their weights is kept.

    Each ``torch.nn.Linear`` with a weight [N, K] in float32, bfloat16 or float16 on the CPU is
    replaced by a module that holds the packed weight and the bias alone. A weight that an embedding
    shares is kept for that. `generate` then runs such a model by default as it runs others.

    The model can no longer be trained, saved, or moved to another device or dtype.

    Args:
        model: causal LM or encoder-decoder on the CPU, changed in place.

    Returns:
        How many layers were packed, their bytes, and by class the linear layers that stay.

    Raises:
        TypeError: no such model.
        ValueError: a model in training mode, with hooks or replaced forwards, or without a layer to
            pack; the message names it.

    >>> from specdec_hf import generate, pack_
    >>> pack_(model).layers  # doctest: +SKIP
    >>> generate(model, **inputs)  # doctest: +SKIP
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel, got {shown(model)}")
    started = time.perf_counter()
    reason = twin_reason(model) or ("it is in training mode" if model.training else None)
    reasons = [unpacked_reason(m) for m in model.modules() if type(m) is nn.Linear]
    if reason is None and None not in reasons:
        reason = next(iter(reasons), None) or "it has no plain linear layers"
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot be packed: {reason}")
    record_of(model).packed = None
    stats = PackedStats()
    # A layer goes with its weight as soon as no module has it.
    _replace_in(model, weakref.WeakKeyDictionary(), _held_elsewhere(model), stats)
    layers = [m for m in model.modules() if isinstance(m, PackedInPlace)]
    stats.layers, stats.bytes = len(layers), sum(layer.nbytes for layer in layers)
    stats.seconds, stats.resident_bytes = time.perf_counter() - started, resident_bytes()
    return stats


def _held_elsewhere(model: nn.Module) -> set[int]:
    """Numbers of the parameters that other modules than linear layers hold."""
    others = (m for m in model.modules() if type(m) is not nn.Linear)
    return {id(p) for m in others for p in m._parameters.values() if p is not None}


def _replace_in(
    module: nn.Module,
    packed: weakref.WeakKeyDictionary[nn.Module, PackedInPlace],
    held: set[int],
    stats: PackedStats,
) -> None:
    for name, child in module._modules.items():
        if child is None:
            continue
        if is_other_linear(child):
            kind = type(child).__name__
            stats.unpacked[kind] = stats.unpacked.get(kind, 0) + 1
        elif unpacked_reason(child) is not None:
            _replace_in(child, packed, held, stats)
        else:
            if child not in packed:
                assert isinstance(child, nn.Linear)
                packed[child] = PackedInPlace(child, tied=id(child.weight) in held)
            module._modules[name] = packed[child]
