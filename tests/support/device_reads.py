"""A count of what a test's call reads from tensors, as it would read from a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")


@contextmanager
def spied_reads(*allowed: tuple[Any, str]) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Count the calls of some functions, and note the reads of tensors outside of them.

    Args:
        allowed: an object and the name of its function, in which reads are not noted.

    Yields:
        The calls by name, and the names of the methods that read elsewhere.
    """
    inside: list[bool] = []
    calls, others = dict.fromkeys((name for _, name in allowed), 0), list[str]()

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            inside.append(True)
            try:
                return function(*args)
            finally:
                inside.pop()

        return call

    def spied(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not inside:
                others.append(name)
            return method(self, *args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in allowed:
            patch.setattr(owner, name, counted(getattr(owner, name), name))
        for name in READS:
            patch.setattr(torch.Tensor, name, spied(getattr(torch.Tensor, name), name))
        yield calls, others
