"""Validation of an op's arguments, which is in C++ alone: the native op `validate_<op>`.

The op itself validates where C++ or CUDA kernels run it. Triton's provider and the fake kernels,
which are written in Python, call the same validation from here. It raises RuntimeError, and the
message names the argument, the rule and the value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops

Outputs = Callable[..., Any]


def validate(op: str, arguments: Sequence[Any]) -> None:
    """Raise what the op raises for these arguments, which are in the order of its schema."""
    getattr(ops, f"validate_{op}").default(*arguments)


def fake_kernel(op: str) -> Callable[[Outputs], Outputs]:
    """Decorate what makes an op's empty outputs: its fake kernel validates and calls that.

    Where a size is symbolic, the op validates when it runs: to compare it here, in C++, would make
    it a constant of the graph.
    """

    def register(outputs: Outputs) -> Outputs:
        def fake(*arguments: Any) -> Any:
            if not any(map(_is_symbolic, arguments)):
                # Below the dispatch to FakeTensorMode, C++ reads sizes and devices of fake tensors.
                with torch._C._DisableTorchDispatch():
                    validate(op, arguments)
            return outputs(*arguments)

        torch.library.register_fake(add_op_namespace_prefix(op), fake)
        return outputs

    return register


def _is_symbolic(argument: Any) -> bool:
    if isinstance(argument, Tensor):
        return any(map(_is_symbolic, (*argument.shape, *argument.stride())))
    if isinstance(argument, Sequence):
        return any(map(_is_symbolic, argument))
    return isinstance(argument, torch.SymInt)
