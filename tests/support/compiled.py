"""Functions of several ops under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from support.providers import assert_all_equal


def assert_one_graph(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], backend: str = "aot_eager"
) -> None:
    """One graph serves the arguments of all calls, and gives what the function gives."""
    from torch._dynamo.testing import CompileCounterWithBackend  # noqa: PLC0415  # slow

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    for args in calls:
        assert_all_equal(compiled(*args), function(*args))
        frames.append(counter.frame_count)
    assert frames == frames[:1] * len(frames)
