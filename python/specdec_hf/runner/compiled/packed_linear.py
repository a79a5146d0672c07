"""Linear layers whose weights are packed once, for forwards of few tokens on a CPU.

``torch.nn.functional.linear`` takes a weight as it lies in memory, in rows, and the products with 2
to 32 tokens then cost 1.5 to 2.5 times what reading the weight costs. `specdec_kernels` reads a
packed weight once, at the speed of memory, and the bits of a token do not depend on those beside
it. Packed weights are a second copy: the model keeps its own, which serves wider forwards.

The op takes the model's own weight and finds the packed copy by its address, shape and dtype. So
one compiled graph serves all layers, and its inputs are ordinary tensors.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.functional import linear

from specdec_kernels import PackedLinear as Packed
from specdec_kernels import pack_linear, packed_linear

MAX_ROWS = 64  # of `specdec_kernels.packed_linear`
_library = torch.library.Library("specdec_hf", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_Place = tuple[int, torch.Size, torch.dtype]  # address, shape and dtype of a weight
_packed: dict[_Place, Packed] = {}


def _packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    packed = _packed.get(_place_of(weight))
    if packed is None or x.numel() > MAX_ROWS * x.shape[-1]:
        return linear(x, weight, bias)
    return packed_linear(x, packed, bias)


def _packed_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library.impl("packed_linear", _packed_linear, "CPU")
_library.impl("packed_linear", _packed_linear_fake, "Meta")
_op = torch.ops.specdec_hf.packed_linear.default


class PackedLinear(torch.nn.Module):
    """A linear layer with a packed copy of the weight of another, which it shares.

    Args:
        linear: the layer; see `unpacked_reason`.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._parameters = linear._parameters
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._state: tuple[_Place, int] | None = None
        self._contents = torch.empty(0)
        self._forget: Any = None
        self.refresh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _op(x, self.weight, self.bias)
        return y

    def refresh(self) -> bool:
        """Pack the weight again if it has changed since the last time, and say whether it has.

        Writes to ``weight.data``, as libraries make that merge adapters, leave the address and
        the version of a weight as they are, so the contents are compared too.
        """
        weight: Any = self.weight
        state = (_place_of(weight), weight._version)
        contents = _digest(weight.detach())
        if state == self._state and torch.equal(contents, self._contents):
            return False
        if self._state is not None:
            self._forget()
        with torch.inference_mode(False), torch.no_grad():
            packed = pack_linear(weight.detach())
        _packed[state[0]] = packed
        # The weight lives as long as this object, so no other tensor gets its address meanwhile.
        self._held, self._state = weight.detach(), state
        self._contents = contents
        self._forget = weakref.finalize(self, _forget, state[0], packed)
        return True


def _digest(weight: torch.Tensor) -> torch.Tensor:
    """What tells changed contents: the sum of the bits of each row, and all bits of three rows.

    Args:
        weight: [N, K], contiguous, with at least one number.

    Returns:
        int64, of one dimension. Sums wrap around. They miss that numbers of a row change places,
        which the three rows show where it happens in all rows.
    """
    rows, row_bytes = len(weight), weight.shape[1] * weight.element_size()
    # As wide as a view can be: sums of int64 run at the speed of memory.
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    begin = weight.storage_offset() * weight.element_size()
    bits = weight.view(next(integers[n] for n in integers if row_bytes % n == begin % n == 0))
    some = bits[[0, rows // 2, rows - 1]].flatten().long()
    return torch.cat([bits.sum(dim=1, dtype=torch.int64), some])


def _place_of(weight: torch.Tensor) -> _Place:
    return weight.data_ptr(), weight.shape, weight.dtype


def _forget(place: _Place, packed: Packed) -> None:
    """Drop a packed copy, unless the weight was packed again by another layer since."""
    if _packed.get(place) is packed:
        del _packed[place]


def unpacked_reason(module: torch.nn.Module) -> str | None:
    """Why a module is not replaced by a `PackedLinear`, or None."""
    if type(module) is not torch.nn.Linear:
        return "it is no plain linear layer"
    weight = module.weight
    if weight.numel() == 0:
        return "an empty weight has nothing to pack"
    if weight.device.type != "cpu":
        return "weights are packed on a CPU only"
    if weight.is_inference() or not weight.is_contiguous():
        return "changes of its weight cannot be seen"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights of {weight.dtype} are not packed"
    return None
