"""Packing a model in place, for whoever has no memory for two copies of its weights."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specdec_hf.arguments import shown
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.module_copy import copy_reason
from specdec_hf.runner.packed.blocks import BlockFile
from specdec_hf.runner.packed.linear import bytes_of, unpacked_reason
from specdec_hf.runner.packed.model import OnlyPacked, PackedStats, is_other_linear, resident_bytes
from specdec_kernels import PackedLinear, pack_linear, packed_linear, unpack_blocks


class PackedInPlace(OnlyPacked):
    """A linear layer that holds its weight in panels alone.

    Args:
        layer: that it replaces.
        packed: the weight of the layer; layers with one weight share it.
        tied: whether another module needs the weight, which is then kept too.
    """

    def __init__(self, layer: nn.Linear, packed: PackedLinear, *, tied: bool) -> None:
        super().__init__()
        self.train(layer.training)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self._tied, self.dtype = layer.weight if tied else None, layer.weight.dtype
        self.is_tied = tied
        self.packed_weight = packed

    @property
    def panels(self) -> torch.Tensor:
        """Those of the weight."""
        return self.packed_weight.panels

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]: the tied weight, or a new tensor."""
        if self._tied is not None:
            return self._tied
        panels, inputs, outputs = self.packed_weight
        if panels.dtype == torch.uint8:
            return unpack_blocks(self.packed_weight).to(self.dtype)
        if panels.ndim == 4:  # pairs of inputs
            panels = panels.transpose(2, 3).flatten(1, 2)
        return panels.transpose(1, 2).flatten(0, 1)[:outputs, :inputs].contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.dtype or torch.is_autocast_enabled("cpu"):
            return linear(x, self.weight, self.bias)
        return packed_linear(x, self.packed_weight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        own = self.panels.new_empty(0, dtype=self.dtype)
        other = fn(own)
        if (other.dtype, other.device) == (own.dtype, own.device):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # It is too late to refuse: other modules have been converted before this one.
        plain = nn.Linear(self.in_features, self.out_features, device="meta").train(self.training)
        plain.weight = nn.Parameter(self.weight) if self._tied is None else self._tied
        plain.bias = self.bias
        plain._apply(fn, recurse)
        layer: Any = plain
        if unpacked_reason(plain) is None:
            packed = pack_linear(plain.weight.detach())
            layer = PackedInPlace(plain, packed, tied=self._tied is not None)
        self.__class__, self.__dict__ = type(layer), layer.__dict__
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles, without panels, which other processors cannot read."""
        return {**self.__dict__, "packed_weight": self.weight if self._tied is None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        weight = state["packed_weight"] if self._tied is None else self._tied
        self.packed_weight = pack_linear(weight.detach())

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

    The model can no longer be trained or saved. It is packed again where it is converted to another
    of these dtypes, copied or unpickled. Its layers become plain ones again where it is moved to
    another device or dtype.

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
    reason = copy_reason(model) or ("it is in training mode" if model.training else None)
    reasons = [unpacked_reason(m) for m in model.modules() if type(m) is nn.Linear]
    if reason is None and None not in reasons:
        reason = next(iter(reasons), None) or "it has no plain linear layers"
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot be packed: {reason}")
    record = record_of(model)
    record.packed.clear()
    others: dict[nn.Module, None] = {}
    # A layer goes with its weight as soon as no module has it.
    pack = partial(_pack, record.blocks)
    _replace_in(model, weakref.WeakKeyDictionary(), {}, _held_elsewhere(model), others, pack)
    layers = [m for m in model.modules() if isinstance(m, PackedInPlace)]
    return PackedStats(
        layers=len(layers),
        blocks=sum(layer.panels.dtype == torch.uint8 for layer in layers),
        bytes=bytes_of(layers),
        resident_bytes=resident_bytes(),
        seconds=time.perf_counter() - started,
        unpacked=dict(Counter(type(module).__name__ for module in others)),
    )


def _pack(file: BlockFile | None, weight: torch.Tensor) -> PackedLinear:
    return (file and file.pack(weight)) or pack_linear(weight)


def _held_elsewhere(model: nn.Module) -> set[int]:
    """Numbers of the parameters that other modules than linear layers hold."""
    others = (m for m in model.modules() if type(m) is not nn.Linear)
    return {id(p) for m in others for p in m._parameters.values() if p is not None}


def _replace_in(
    module: nn.Module,
    made: weakref.WeakKeyDictionary[nn.Module, PackedInPlace],
    packed: dict[int, PackedLinear],
    held: set[int],
    others: dict[nn.Module, None],
    pack: Callable[[torch.Tensor], PackedLinear],
) -> None:
    """As `pack_`; ``packed`` has the number of each weight, ``others`` what stays."""
    for name, child in module._modules.items():
        if child is None:
            continue
        if is_other_linear(child):
            others[child] = None
        elif unpacked_reason(child) is not None:
            _replace_in(child, made, packed, held, others, pack)
        else:
            if child not in made:
                assert isinstance(child, nn.Linear)
                number = id(child.weight)
                if number not in packed:
                    packed[number] = pack(child.weight.detach())
                made[child] = PackedInPlace(child, packed[number], tied=number in held)
            module._modules[name] = made[child]
