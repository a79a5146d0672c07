"""The host side of a launch: the arguments of a kernel, tiles, scratch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import linecache
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..versions import refuse_other

refuse_other("triton", triton.__version__)

TILE = 4096  # part of the contract: rounding depends on it
CHUNK = 1024  # entries of one step of a threshold search, which keeps 8 accumulators for each
MAX_BLOCK = 1024
LIST = 1024  # tokens that a filter may leave in a list; at most TILE
# Without contraction a product and a sum are rounded separately on every device, as they are in the
# interpreter.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def kernel(*specialized: str) -> Callable[[Any], Any]:
    """Decorate a kernel that is compiled anew only for other dtypes and constants.

    specialized: arguments, or members of records by the argument's name and theirs, of which the
        machine code may use more: that an integer is 1 or a multiple of 16, or that a tensor begins
        at a multiple of 16 bytes. Triton would assume that of all arguments, so that another top_k
        or a slice of the seeds would compile within a call. It pays for rows, which are read whole,
        and for strides of what is read side by side.
    """

    def decorate(function: Any) -> Any:
        members = members_of(function)
        wanted = {part for n in specialized for part in parts_of(n, members.get(n, ()))}
        if any(members.values()):
            function = flat(function)
        values = [
            name
            for name, p in inspect.signature(function).parameters.items()
            if "constexpr" not in str(p.annotation)
        ]
        return triton.jit(function, do_not_specialize=[n for n in values if n not in wanted])

    return decorate


def parts_of(name: str, fields: tuple[str, ...]) -> list[str]:
    """The arguments of a kernel that stand for one of its arguments, which may be a record."""
    return [f"{name}_{field}" for field in fields] or [name]


def members_of(function: Any) -> dict[str, tuple[str, ...]]:
    """The names of the members of each argument that is a record, by its annotation."""
    return {
        name: getattr(function.__globals__.get(p.annotation), "_fields", ())
        for name, p in inspect.signature(function).parameters.items()
    }


def flat(function: Any) -> Any:
    """The kernel with one argument for each member of its records.

    Triton looks at every member of a record that a kernel takes, so that other values would compile
    it anew. It reads the source of a kernel, which `linecache` therefore keeps.
    """
    name, members = function.__name__, members_of(function)
    types = {n: p.annotation for n, p in inspect.signature(function).parameters.items()}
    parameters = [p for n, fields in members.items() for p in parts_of(n, fields) if fields]
    parameters += [f"{n}: {types[n]}" for n, fields in members.items() if not fields]
    records = [
        f"{types[n]}({', '.join(parts_of(n, fields))})" if fields else n
        for n, fields in members.items()
    ]
    source = f"def {name}({', '.join(parameters)}):\n    {name}_of_records({', '.join(records)})\n"
    file = f"<kernel {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    made: dict[str, Any] = {f"{name}_of_records": triton.jit(function)}
    namespace = function.__globals__ | made
    exec(compile(source, file, "exec", dont_inherit=True), namespace)
    namespace[name].__module__ = function.__module__
    return namespace[name]


def start(
    kernel: Any, grid: tuple[int, ...], records: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Launch a kernel with the members of its records and those of `constants` that it takes."""
    own = {name: constants[name] for name in kernel.arg_names if name in constants}
    kernel[grid](*itertools.chain.from_iterable(records), **own, **OPTIONS)


class Tiling(NamedTuple):
    tiles: int
    block: int  # tiles that one scan step takes
    log_tiles: int
    span: int  # neighbouring entries of which a filter knows the maximum
    spans: int  # of all tiles, a power of two


@functools.lru_cache(maxsize=256)
def tiling(v: int) -> Tiling:
    tiles = -(-v // TILE)
    log_tiles = (tiles - 1).bit_length()
    width = 1 << log_tiles
    per_tile = min(16, max(1, 1024 // width))
    block = min(max(width, 16), MAX_BLOCK)
    return Tiling(tiles, block, log_tiles, TILE // per_tile, width * per_tile)


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
