"""The specification in code: each op in float64, one row or sequence at a time.

The ops have the signatures of `torch.ops.specdec_kernels` and take CPU tensors. They are slow and
short on purpose, and every other implementation is compared with them. The rules themselves are
explained in docs/rules.md.
"""

from __future__ import annotations

import importlib
from typing import Any

from .._library import OPS
from .row.distribution import Distribution
from .row.noise import TAIL, exponentials, philox, uniform
from .row.sample import pick

__all__ = ["TAIL", "Distribution", "exponentials", "philox", "pick", "uniform"]


def __getattr__(op: str) -> Any:
    """The reference of an op, from the module of this package that the table of ops names."""
    if op not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {op!r}")
    return getattr(importlib.import_module(f"{__name__}.{OPS[op]}"), op)
