"""Triton provider of the ops that draw, for CUDA devices (and the CPU interpreter).

Nothing here imports triton until an op is first called: the import costs about a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["register"]

_libraries: list[torch.library.Library] = []


def _sample(*args: Any) -> tuple[Tensor, ...]:
    from specdec_kernels.triton.sample import sample  # noqa: PLC0415

    return sample(*args)


def _verify_chain(*args: Any) -> tuple[Tensor, ...]:
    from specdec_kernels.triton.chain import verify_chain  # noqa: PLC0415

    return verify_chain(*args)


def _verify_tree(*args: Any) -> tuple[Tensor, ...]:
    from specdec_kernels.triton.tree import verify_tree  # noqa: PLC0415

    return verify_tree(*args)


def register(dispatch_key: str = "CUDA") -> None:
    """Serve the ops on `dispatch_key`; the schemas must be there. A second call changes nothing."""
    if _libraries:
        return
    library = torch.library.Library("specdec_kernels", "IMPL")
    library.impl("sample", _sample, dispatch_key)
    library.impl("verify_chain", _verify_chain, dispatch_key)
    library.impl("verify_tree", _verify_tree, dispatch_key)
    # The registrations live as long as the object that made them.
    _libraries.append(library)
