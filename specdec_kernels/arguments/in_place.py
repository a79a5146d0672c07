"""What an op that writes a tensor in place owes to autograd and to its other arguments.

No op here is differentiable. A tensor that is written must not be a leaf that requires a gradient,
for its gradient would belong to other values. Where autograd saved a tensor for a backward pass,
it notices by the version counter that the tensor was written since, and the backward pass raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_leaves(tensors: Sequence[Tensor], name: str) -> None:
    """Raises RuntimeError for a leaf that requires a gradient, or a view of one, in grad mode."""
    if not torch.is_grad_enabled():
        return
    for i, t in enumerate(tensors):
        if t.requires_grad:  # the name costs time
            check_leaf(t, f"{name}[{i}]")


def check_leaf(t: Tensor, name: str) -> None:
    """The same of one tensor."""
    if torch.is_grad_enabled() and t.requires_grad and (t if t._base is None else t._base).is_leaf:
        raise RuntimeError(
            f"{name} must not be a leaf that requires a gradient, because it is written in place, "
            "got requires_grad=True"
        )


def raise_versions(tensors: Sequence[Tensor]) -> None:
    """Counts one more version of each tensor, for autograd."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # outside of inference mode, inference tensors have no version to raise
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def read_first(tensors: Sequence[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with a copy in place of each that lies in the storage of a written one.

    So an op reads all of its arguments before it writes.
    """
    storages = {t.untyped_storage()._cdata for t in written}
    return [t.clone() if t.untyped_storage()._cdata in storages else t for t in tensors]
