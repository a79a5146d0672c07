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
        # As long as this object holds the weight, no other tensor gets its address.
        self._held = weight.detach()
        self._version, self._contents = -1, torch.empty(0)
        self.panels = PackedLinear(torch.empty(0), 0, 0)

    def refresh(self, weight: Any) -> bool:
        """Pack the weight if it has changed since the last time, and say whether it has.

        Writes to ``weight.data``, as libraries make that merge adapters, leave the address and
        the version of a weight as they are, so the contents are compared too.
        """
        version, contents = weight._version, _digest(weight.detach())
        if version == self._version and torch.equal(contents, self._contents):
            return False
        with torch.inference_mode(False), torch.no_grad():
            own = weight.detach()
            self.panels = (self.stored and self.stored(own)) or pack_linear(own)
        self._version, self._contents = version, contents
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
        self.refresh()

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

    def refresh(self) -> bool:
        """Pack the weight again if it has changed since the last time, and say whether it has."""
        weight: Any = self.weight
        place = _place_of(weight)
        if self._copy is None or self._copy.place != place:
            copy = _PackedCopy(weight) if self._apart else _copies.get(place)
            if copy is None:
                copy = _copies[place] = _PackedCopy(weight)
            self._copy = copy
            if copy.stored is None and self._stored is not None:
                copy.stored, copy._version = self._stored, -1
        return self._copy.refresh(weight)


def bytes_to_pack(layers: list[torch.nn.Linear]) -> int:
    """What the packed copies of layers will take beside those that exist."""
    weights = {_place_of(layer.weight): layer.weight for layer in layers}
    return sum(x.nbytes for place, x in weights.items() if place not in _copies)


def bytes_of(layers: Iterable[Any]) -> int:
    """Of the panels of packed layers, each once, because layers share those of one weight."""
    return sum({id(layer.panels): layer.panels.nbytes for layer in layers}.values())


def _digest(weight: torch.Tensor) -> torch.Tensor:
    """What tells changed contents: the sum of the bits of each row, and all bits of three rows.

    Args:
        weight: [N, K], contiguous, with at least one number.

    Returns:
        int64, of one dimension. Sums wrap around. They miss that numbers of a row change places,
        which the three rows show where it happens in all rows.
    """
    rows = len(weight)
    some = bits_of(weight)[[0, rows // 2, rows - 1]].flatten().long()
    return torch.cat([row_sums(weight), some])


def row_sums(weight: torch.Tensor) -> torch.Tensor:
    """[N] int64: the sum of the bits of each row, which wraps around.

    Args:
        weight: [N, K], contiguous, with at least one number.
    """
    return bits_of(weight).sum(dim=1, dtype=torch.int64)


def bits_of(weight: torch.Tensor) -> torch.Tensor:
    """The bits of [N, K], as wide as a view can be: sums of int64 run at the speed of memory."""
    row_bytes = weight.shape[1] * weight.element_size()
    begin = weight.storage_offset() * weight.element_size()
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return weight.view(next(integers[n] for n in integers if row_bytes % n == begin % n == 0))


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
