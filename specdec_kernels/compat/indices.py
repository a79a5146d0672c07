"""The check of indices that a caller gives."""

from __future__ import annotations

from torch import Tensor

from ..arguments.checks import require


def check_in_range(name: str, t: Tensor, end: int, begin: int = 0) -> None:
    """The integers must be in [begin, end). On a GPU this is not checked: the host would wait."""
    if t.device.type != "cpu" or not t.numel():
        return
    low, high = (int(x) for x in t.aminmax())
    wrong = low if low < begin else high
    require(begin <= low and high < end, f"{name} must be in [{begin}, {end - 1}], got {wrong}")
