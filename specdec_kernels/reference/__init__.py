"""The specification in code: every op, one row at a time, in float64.

Each function has the name and the signature of an op of `torch.ops.specdec_kernels` and takes CPU
tensors. It is slow and short on purpose: what the kernels do is defined here.
"""

from __future__ import annotations

import importlib
from typing import Any

from specdec_kernels._library import OPS
from specdec_kernels.reference.row.distribution import (
    TAIL,
    Distribution,
    exponentials,
    philox,
    pick,
    uniform,
)

__all__ = ["TAIL", "Distribution", "exponentials", "philox", "pick", "uniform"]
__all__ += list(OPS)


def __getattr__(op: str) -> Any:
    """The reference of an op; its module is imported when it is first asked for."""
    if op not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {op!r}")
    return getattr(importlib.import_module(f"{__name__}.{OPS[op]}"), op)
