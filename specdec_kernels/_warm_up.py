"""`warm_up`: the first launch of every op, which has no place in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels._library import providers

# The cache ops have another kernel for more caches than fit one small table of pointers.
_MANY_CACHES = 65


def warm_up(device: torch.device | str | None = None) -> None:
    """Launch the kernels of every op once on a CUDA device, and wait for them.

    The first launch of a kernel loads its code and asks the driver how much of it the device runs
    at once, either of which can end the capture of a CUDA graph. Call this before you capture ops
    that have not run yet. It also tells whether the kernels run here at all: a library that was
    built for another driver or another GPU is imported without complaint.

    Ops that Triton serves (see `providers`) are compiled for the dtypes of their arguments, so that
    a call with other dtypes compiles again: make such a call yourself before you capture it.

    Args:
        device: the CUDA device; None is the current one.

    Raises:
        ValueError: the device is no CUDA device.
        RuntimeError: torch sees no CUDA device, no op has kernels for one, a capture is under way,
            or an op does not run. The message names the op, and for a failed launch the CUDA
            versions of the driver and of the kernels.

    >>> warm_up("cuda")  # doctest: +SKIP
    """
    where = torch.device("cuda" if device is None else device)
    if where.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {where}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device is {where}, but torch sees no CUDA device")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warm_up must be called before the capture of a CUDA graph, not in it")
    ops = [op for op, by_device in providers().items() if by_device["cuda"] != "none"]
    if not ops:
        raise RuntimeError(
            f"no op runs on {where}: _C.so has no CUDA kernels, and Triton is not installed"
        )
    for op in ops:
        _launch(op, where)


def _launch(op: str, where: torch.device) -> None:
    from specdec_kernels import testing  # noqa: PLC0415  # it needs this package

    try:
        args = testing.cases(op)[0].args(where)
        for given in (args, tuple(_many(a) for a in args)):
            getattr(torch.ops.specdec_kernels, op).default(*given)
        torch.cuda.synchronize(where)
    except RuntimeError as error:
        raise RuntimeError(f"{op} does not run on {where}: {error}") from error


def _many(value: object) -> object:
    """A list of caches with each one repeated in memory of its own; other values as they are."""
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [t.clone() for t in value for _ in range(_MANY_CACHES)]
    return value
