"""Results that an op writes into tensors of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from . import conversion, in_place
from .values import shown

Results = TypeVar("Results", bound=tuple[Any, ...])


def write_out(
    op: Any,
    arguments: Sequence[Any],
    results: type[Results],
    out: Results | None,
    workspace: Tensor | None,
) -> Results:
    """Call the variant of an op that writes into `out`, which is returned."""
    conversion.require_tensor_or_none(workspace, "workspace")
    if out is None:
        raise RuntimeError("workspace must be None unless out is given")
    if not isinstance(out, results):
        raise TypeError(f"out must be a {results.__name__}, got {shown(out)}")
    for name, value in zip(results.__annotations__, out, strict=True):
        if conversion.require_tensor_or_none(value, f"out.{name}") is not None:
            in_place.check_leaf(value, f"out.{name}")
    op(*arguments, *out, workspace)
    in_place.raise_versions([t for t in (*out, workspace) if t is not None])
    return out
