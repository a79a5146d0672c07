"""The host side of a launch: tiles, the schedule, packed arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..arguments.checks import float32
from ..arguments.sample import SamplingArguments
from ..versions import refuse_other

refuse_other("triton", triton.__version__)

TILE = 4096  # part of the contract: rounding depends on it
CHUNK = 1024  # entries of one step of a threshold search, which keeps 8 accumulators for each
MAX_BLOCK = 1024
# Without contraction a product and a sum are rounded separately on every device, as they are in the
# interpreter.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}

# None chooses by batch size. Tests set it to compare the schedules.
force_row_parallel: bool | None = None


def kernel(*specialized: str) -> Callable[[Any], Any]:
    """Decorate a kernel that is compiled anew only for other dtypes and constants.

    specialized: arguments of which the machine code may use more: that an integer is 1 or a
        multiple of 16, or that a tensor begins at a multiple of 16 bytes. Triton would assume that
        of all arguments, so that another top_k or a slice of the seeds would compile within a call.
        It pays for rows, which are read whole, and for strides of what is read side by side.
    """

    def decorate(function: Any) -> Any:
        parameters = inspect.signature(function).parameters.items()
        values = [name for name, p in parameters if "constexpr" not in str(p.annotation)]
        if unknown := set(specialized) - {*values}:
            raise ValueError(f"specialized must name arguments, got {sorted(unknown)}")
        plain = [name for name in values if name not in specialized]
        return triton.jit(function, do_not_specialize=plain)

    return decorate


class Tiling(NamedTuple):
    tiles: int
    block: int  # tiles that one scan step takes
    log_tiles: int


@functools.lru_cache(maxsize=256)
def tiling(v: int) -> Tiling:
    tiles = -(-v // TILE)
    log_tiles = (tiles - 1).bit_length()
    return Tiling(tiles, min(max(1 << log_tiles, 16), MAX_BLOCK), log_tiles)


def width(k: int) -> int:
    """The number of entries of a sparse draft that one step takes."""
    return min(max(1 << max(k - 1, 0).bit_length(), 16), 1024)


@functools.lru_cache(maxsize=64)
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def row_parallel(t: Tensor, batch: int, tiles: int) -> bool:
    """Whether a grid over (row, tile) should come first: too few sequences to fill the device."""
    if force_row_parallel is not None:
        return force_row_parallel
    if t.device.type != "cuda" or tiles == 1:
        return False
    return batch < 2 * _processors(t.device.index)


@contextlib.contextmanager
def on_device_of(t: Tensor) -> Iterator[None]:
    if t.device.type == "cuda":
        with torch.cuda.device(t.device):
            yield
    else:
        # The interpreter's NumPy warns of infinities, which the kernels use on purpose.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield


def packed(*tensors: Any) -> tuple[Any, ...]:
    """Small per-sequence tensors, contiguous: kernels then need no stride for each."""
    return tuple(t if t is None or t.is_contiguous() else t.contiguous() for t in tensors)


def scratch(t: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Uninitialised (maxima, sums) of tile statistics, see `TileStats`."""
    return t.new_empty((size,), dtype=torch.float32), t.new_empty((size,), dtype=torch.int64)


class Filters(NamedTuple):
    """The filter arguments of a kernel, in its order; see `SamplingArguments`."""

    top_ks: Tensor | None
    top_k: int
    top_ps: Tensor | None
    top_p: float
    min_ps: Tensor | None
    min_p: float


def filters(v: int, sampling: SamplingArguments) -> Filters:
    """A top_k of V or more keeps every token."""
    s = sampling
    top_ks, top_ps, min_ps = packed(s.top_ks, s.top_ps, s.min_ps)
    return Filters(top_ks, min(s.top_k, v), top_ps, float32(s.top_p), min_ps, float32(s.min_p))


def filtering(v: int, f: Filters) -> bool:
    """Whether some sequence may have a filter; values on the device are not read."""
    tensors = f.top_ks is not None or f.top_ps is not None or f.min_ps is not None
    return tensors or 0 < f.top_k < v or f.top_p < 1 or f.min_p > 0
