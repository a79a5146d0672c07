"""Measures time, launches and memory of a call, on the CPU and on a CUDA device."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Call = Callable[[], Any]
# Parts of the names of the first and the last kernel of `flush`. No sampler computes an xor or both
# extremes of a tensor, so that these names tell a flush from the work that is measured.
_FLUSH_BEGINS, _FLUSH_ENDS = "bitwisexor", "minmaxops"


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of some times in microseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@functools.cache
def _flush_buffers() -> tuple[Tensor, Tensor]:
    size = 2 * torch.cuda.get_device_properties().L2_cache_size
    first, second = torch.zeros(2, size // 4, dtype=torch.int32, device="cuda")
    return first, second


def flush() -> None:
    """Write and read twice the size of the L2 cache, so that no call finds its inputs there.

    Without the read, the next call would pay for writing back the modified lines. The event keeps
    a launch that may overlap its predecessor from overlapping the flush.
    """
    written, read = _flush_buffers()
    written.bitwise_xor_(1)
    read.aminmax()
    torch.cuda.Event().record()


def seconds(f: Call) -> float:
    begin = time.perf_counter()
    f()
    return time.perf_counter() - begin


def _cuda_round(calls: Mapping[str, Call], *, flushed: bool) -> dict[str, float]:
    marks = {}
    for name, f in calls.items():
        if flushed:
            flush()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        f()
        end.record()
        marks[name] = begin, end
    torch.cuda.synchronize()
    return {name: begin.elapsed_time(end) * 1e3 for name, (begin, end) in marks.items()}


def _round(calls: Mapping[str, Call], device: str, flushed: bool) -> dict[str, float]:
    if device == "cuda":
        return _cuda_round(calls, flushed=flushed)
    return {name: seconds(f) * 1e6 for name, f in calls.items()}


def rounds(
    calls: Mapping[str, Call],
    device: str,
    *,
    budget: float,
    least: int = 3,
    most: int = 60,
    flushed: bool = True,
) -> dict[str, list[float]]:
    """Microseconds of each call in each round. A round makes every call once, one after another.

    budget: seconds that all rounds should take together; at least `least` rounds are made.
    flushed: whether a device's L2 cache is emptied before each call.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    while len(next(iter(found.values()), [])) < most and calls:
        done = len(next(iter(found.values())))
        if done >= least and time.perf_counter() - begin > budget:
            break
        for name, us in _round(calls, device, flushed).items():
            found[name].append(us)
    return found


def capture(f: Call, variants: int) -> Call:
    """Capture `variants` calls of f as CUDA graphs; returns a call that replays the next one."""
    stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(stream)
    # A failed capture leaves generator and allocator unusable, so that a call which waits for the
    # device is refused before the capture.
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            f()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        stream.wait_stream(side)
    # The graphs may share a pool: they never run at the same time and nobody reads their outputs.
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for _ in range(variants):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            f()
        graphs.append(graph)
    turns = itertools.cycle(graphs)
    return lambda: next(turns).replay()


def device_activity(f: Call, calls: int, named: str = "") -> tuple[float, float]:
    """(launches, microseconds on the device), the mean over some calls.

    Launches are kernels, copies and fills. Every call follows a flush, which is not counted.

    named: what the names of all kernels of f contain. If it is given, launches with this in their
        name are counted where flushes cannot be told from calls.
    """
    flush()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(calls):
            flush()
            f()
        torch.cuda.synchronize()
    kept = _of_calls(profile.events(), calls, named)
    return len(kept) / calls, sum(event.time_range.elapsed_us() for event in kept) / calls


def _on_device(events: Iterable[Any]) -> list[Any]:
    return [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]


def _of_calls(events: Iterable[Any], flushes: int, named: str) -> list[Any]:
    """The device events of the calls between flushes, by their order or else by their name."""
    known = list(events)
    try:
        return _without_flushes(known, flushes)
    except RuntimeError:
        own = [event for event in _on_device(known) if named and named in event.name]
        if not own:
            raise
        return own


def _without_flushes(events: Iterable[Any], flushes: int) -> list[Any]:
    """The device events that belong to no flush; raises if flushes cannot be told apart."""
    kept, seen, inside = [], 0, False
    for event in sorted(_on_device(events), key=lambda event: event.time_range.start):
        name = event.name.lower().replace("_", "")
        inside = inside or _FLUSH_BEGINS in name
        if not inside:
            kept.append(event)
        elif _FLUSH_ENDS in name:
            seen, inside = seen + 1, False
    if seen != flushes or inside:
        raise RuntimeError(f"the profiler shows {seen} of {flushes} flushes of the cache")
    if not kept:
        raise RuntimeError("the profiler shows no work of the calls on the device")
    return kept


class Operands(TorchDispatchMode):
    """Counts dispatched ops and the bytes of their operands and results; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):
            self.ops += 1
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result


def dispatched(f: Call) -> tuple[int, int]:
    """(ops that one call dispatches, bytes of their operands and results)."""
    with Operands() as counted:
        f()
    return counted.ops, counted.bytes


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def peak_extra(f: Call, device: str) -> int | None:
    """Bytes that a call allocates at its peak on top of those allocated before; outputs count.

    On the CPU this is the growth of the resident set's high-water mark, which counts memory of
    PyTorch and of C++ alike, in whole pages. None if the system cannot reset that mark.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        # A call that reuses freed pages of the allocator would not raise the mark.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmHWM")
    except (OSError, AttributeError):
        return None
    f()
    return _resident("VmHWM") - before


@functools.cache
def seconds_per_exp() -> float:
    """Seconds for one float32 of `torch.exp` in the CPU's cache, in the best of many calls."""
    x = torch.linspace(-20, 0, 2**16 * torch.get_num_threads())
    out = torch.empty_like(x)
    calls: dict[str, Call] = {"exp": lambda: torch.exp(x, out=out)}
    return min(rounds(calls, "cpu", budget=1, most=2000)["exp"]) / 1e6 / x.numel()


@functools.cache
def read_bandwidth(device: str) -> float:
    """Bytes per second that this machine reads from memory now, in the best of many reductions."""
    if device == "cuda":
        x = torch.ones(2**29, dtype=torch.float32, device="cuda")  # 2 GiB
        copy = torch.empty_like(x)
        calls: dict[str, Call] = {"sum": x.sum, "copy": lambda: copy.copy_(x)}
        best = {name: min(us) for name, us in rounds(calls, device, budget=1, most=20).items()}
        size = x.numel() * x.element_size()
        return max(size / best["sum"], 2 * size / best["copy"]) * 1e6
    x = torch.ones(2**26, dtype=torch.float32)  # 256 MiB
    reads: dict[str, Call] = {"sum": x.sum, "max": x.max}
    best = {name: min(us) for name, us in rounds(reads, device, budget=2, most=20).items()}
    return x.numel() * x.element_size() / min(best.values()) * 1e6
