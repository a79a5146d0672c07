"""Linear layers whose weights are packed once, for forwards on a CPU.

``torch.nn.functional.linear`` takes a weight as it lies in memory, in rows, and the products with 2
to 32 tokens then cost 1.5 to 2.5 times what reading the weight costs. `specdec_kernels` reads a
packed weight once, at the speed of memory, and the bits of a token do not depend on those beside
it. Packed weights are a second copy: the model keeps its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import linear

from specdec_kernels import PackedLinear, pack_linear, packed_linear

# The panels of a weight in blocks; None where there are none.
Stored = Callable[[torch.Tensor], PackedLinear | None]
_Place = tuple[int, torch.Size, torch.dtype]  # address, shape and dtype of a weight


class _PackedCopy:
    """The packed copy of a weight, which all layers share that have the weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.place = _place_of(weight)
        self.stored: Stored | None = None
        # As long as this object holds the weight, no other tensor gets its address. Unlike
        # `Tensor.numpy`, DLPack leaves it to the owner of the weight to resize its storage.
        self._weight = weight.detach()
        self.bytes = np.from_dlpack(self._weight.view(torch.uint8))
        self.digest: int | None = None  # of the weight that was packed
        self.panels = PackedLinear(torch.empty(0), 0, 0)

    def refresh(self, digest: int) -> bool:
        """Pack the weight if its digest is another than before, and say whether it is."""
        if digest == self.digest:
            return False
        with torch.inference_mode(False), torch.no_grad():
            weight = self._weight
            self.panels = (self.stored and self.stored(weight)) or pack_linear(weight)
        self.digest = digest
        return True


_copies: weakref.WeakValueDictionary[_Place, _PackedCopy] = weakref.WeakValueDictionary()


class LinearWithPackedCopy(torch.nn.Module):
    """A linear layer with a packed copy of the weight of another, which it shares.

    Args:
        layer: see `unpacked_reason`.
        stored: whose panels are taken where it has those of the weight.
        apart: whether they are not exactly the weight, so that no layer shares them.
    """

    def __init__(
        self, layer: torch.nn.Linear, stored: Stored | None = None, *, apart: bool = False
    ) -> None:
        super().__init__()
        self._parameters = layer._parameters
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._copy: _PackedCopy | None = None
        self._stored, self._apart = stored, apart
        refresh([self])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        bias: Any = self.bias
        if x.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
            return linear(x, weight, bias)
        return packed_linear(x, self.packed_weight, bias)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return cast("torch.dtype", self.weight.dtype)

    @property
    def packed_weight(self) -> PackedLinear:
        """That of the last refresh."""
        assert self._copy is not None
        return self._copy.panels

    @property
    def panels(self) -> torch.Tensor:
        """Those of the packed copy."""
        assert self._copy is not None
        return self._copy.panels.panels

    def copy_of_weight(self) -> _PackedCopy:
        """That of the weight that the layer has now; it may have to be refreshed."""
        weight: Any = self.weight
        place = _place_of(weight)
        if self._copy is None or self._copy.place != place:
            copy = _PackedCopy(weight) if self._apart else _copies.get(place)
            if copy is None:
                copy = _copies[place] = _PackedCopy(weight)
            self._copy = copy
            if copy.stored is None and self._stored is not None:
                copy.stored, copy.digest = self._stored, None
        return self._copy


def refresh(layers: Iterable[LinearWithPackedCopy]) -> bool:
    """Pack again the weights that have changed since the last time, and say whether any has.

    Writes to ``weight.data``, as libraries make that merge adapters, leave the address and the
    version of a weight as they are, so the contents are compared: in one pass over all weights.

    Raises:
        ValueError: `specdec_host` has no module for this Python.
    """
    try:
        from specdec_host import digests  # noqa: PLC0415  # only packing needs the native module
    except ImportError as error:
        raise ValueError(f"its weights cannot be watched for changes: {error}") from error
    copies = list(dict.fromkeys(layer.copy_of_weight() for layer in layers))
    threads = min(torch.get_num_threads(), 1024)  # the most that it takes
    found = digests([copy.bytes for copy in copies], threads=threads)
    changed = [copy.refresh(digest) for copy, digest in zip(copies, found, strict=True)]
    return any(changed)


def bytes_to_pack(layers: list[torch.nn.Linear]) -> int:
    """What the packed copies of layers will take beside those that exist."""
    weights = {_place_of(layer.weight): layer.weight for layer in layers}
    return sum(x.nbytes for place, x in weights.items() if place not in _copies)


def bytes_of(layers: Iterable[Any]) -> int:
    """Of the panels of packed layers, each once, because layers share those of one weight."""
    return sum({id(layer.panels): layer.panels.nbytes for layer in layers}.values())


def _place_of(weight: torch.Tensor) -> _Place:
    return weight.data_ptr(), weight.shape, weight.dtype


def unpacked_reason(module: torch.nn.Module) -> str | None:
    """Why a module is not replaced by a `LinearWithPackedCopy`, or None."""
    if type(module) is not torch.nn.Linear:
        return "it is no plain linear layer"
    weight = module.weight
    if type(weight) is not torch.nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.numel() == 0:
        return "an empty weight has nothing to pack"
    if weight.device.type != "cpu":
        return "weights are packed on a CPU only"
    if weight.is_inference() or not weight.is_contiguous():
        return "changes of its weight cannot be seen"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights of {weight.dtype} are not packed"
    return None
