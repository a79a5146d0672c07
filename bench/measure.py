"""Time, launches and memory of a call, on the CPU and on a CUDA device."""

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
# No sampler xors or seeks both extremes: the names of the kernels that empty the cache, the first
# and the last, tell them from those being measured.
_FLUSH_BEGINS, _FLUSH_ENDS = "bitwisexor", "minmaxops"


@dataclass(frozen=True)
class Spread:
    """Microseconds: the median and the quartiles around it."""

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
    """Writes twice the L2 cache, so that no call finds its inputs there, and reads as much.

    Without the reading a call would pay for the write-back of the lines left behind. The event
    keeps a launch that may overlap its predecessor out of this one.
    """
    written, read = _flush_buffers()
    written.bitwise_xor_(1)
    read.aminmax()
    torch.cuda.Event().record()


def seconds(f: Call) -> float:
    begin = time.perf_counter()
    f()
    return time.perf_counter() - begin


def _cuda_round(calls: Mapping[str, Call]) -> dict[str, float]:
    marks = {}
    for name, f in calls.items():
        flush()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        f()
        end.record()
        marks[name] = begin, end
    torch.cuda.synchronize()
    return {name: begin.elapsed_time(end) * 1e3 for name, (begin, end) in marks.items()}


def _round(calls: Mapping[str, Call], device: str) -> dict[str, float]:
    if device == "cuda":
        return _cuda_round(calls)
    return {name: seconds(f) * 1e6 for name, f in calls.items()}


def rounds(
    calls: Mapping[str, Call], device: str, *, budget: float, least: int = 3, most: int = 60
) -> dict[str, list[float]]:
    """Microseconds of each call, round by round: neighbours in a round are neighbours in time.

    budget: seconds that the rounds should take together; `least` of them are made in any case.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    while len(next(iter(found.values()), [])) < most and calls:
        done = len(next(iter(found.values())))
        if done >= least and time.perf_counter() - begin > budget:
            break
        for name, us in _round(calls, device).items():
            found[name].append(us)
    return found


def capture(f: Call, variants: int) -> Call:
    """Replays of f as CUDA graphs, one after another: as many as there are turns to go through."""
    stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(stream)
    # A capture that fails leaves generator and allocator unusable: whoever waits is refused before.
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            f()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        stream.wait_stream(side)
    # One pool, as they never run at the same time and nobody reads what they leave.
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for _ in range(variants):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            f()
        graphs.append(graph)
    turns = itertools.cycle(graphs)
    return lambda: next(turns).replay()


def device_activity(f: Call, calls: int) -> tuple[float, float]:
    """Launches (kernels, copies and fills) and microseconds on the device, mean of so many calls.

    Every call finds an empty cache; what empties it is not counted.
    """
    flush()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(calls):
            flush()
            f()
        torch.cuda.synchronize()
    kept = _without_flushes(profile.events(), calls)
    return len(kept) / calls, sum(event.time_range.elapsed_us() for event in kept) / calls


def _without_flushes(events: Iterable[Any], flushes: int) -> list[Any]:
    """The events on the device that belong to no flush. An error if they cannot be told apart."""
    on_device = [
        event
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    kept, seen, inside = [], 0, False
    for event in sorted(on_device, key=lambda event: event.time_range.start):
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
    """Counts dispatched ops and the bytes of their tensor operands; a view costs nothing."""

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
    """Ops that one call dispatches, and the bytes of their operands and results."""
    with Operands() as counted:
        f()
    return counted.ops, counted.bytes


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def peak_extra(f: Call, device: str) -> int | None:
    """Bytes that a call holds at its peak beyond what was held before; outputs count.

    On the CPU the resident set's high-water mark: whatever allocated the memory, PyTorch or C++,
    and one page the least. None where the system does not reset that mark.
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
        # Pages that the allocator kept would serve the call unseen.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmHWM")
    except (OSError, AttributeError):
        return None
    f()
    return _resident("VmHWM") - before


@functools.cache
def seconds_per_exp() -> float:
    """Seconds that torch.exp takes for a float32 in the CPU's cache: the best of many calls."""
    x = torch.linspace(-20, 0, 2**16 * torch.get_num_threads())
    out = torch.empty_like(x)
    calls: dict[str, Call] = {"exp": lambda: torch.exp(x, out=out)}
    return min(rounds(calls, "cpu", budget=1, most=2000)["exp"]) / 1e6 / x.numel()


@functools.cache
def read_bandwidth(device: str) -> float:
    """Bytes a second that this machine reads from memory in this run: the best of many sums."""
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
