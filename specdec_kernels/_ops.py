"""The ops in `torch.ops`: loads the native library that registers them, and knows their namespace.

The builder of Hugging Face kernels writes a file of this name in the place of this one, with its
own `ops` and `add_op_namespace_prefix`. So no module imports anything else from here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from .versions import refuse_other

__all__ = ["add_op_namespace_prefix", "ops"]

# `specdec_kernels`, or the identifier of a kernel: `kernels` imports its package under that name,
# and its library registers the ops there (SPECDEC_LIBRARY in csrc/torch/register.h).
_NAMESPACE = __package__
_LIBRARY = Path(__file__).with_name("_C.so")


def add_op_namespace_prefix(op_name: str) -> str:
    """The name of an op with its namespace, such as ``"specdec_kernels::sample"``."""
    return f"{_NAMESPACE}::{op_name}"


def _load() -> None:
    refuse_other("torch", torch.__version__)
    if not _LIBRARY.exists():
        raise ImportError(
            f"{_LIBRARY.name} is missing beside specdec_kernels: the native library was not built. "
            "In the folder of the sources: pip install --no-build-isolation ."
        )
    try:
        torch.ops.load_library(_LIBRARY)
    except OSError as error:
        raise ImportError(
            f"{_LIBRARY.name} does not load under torch {torch.__version__}: {error}"
        ) from error
    if not hasattr(ops, "built_with_cuda"):
        raise ImportError(
            f"{_LIBRARY.name} was built for another package: it has no torch.ops.{_NAMESPACE}"
        )


ops = getattr(torch.ops, _NAMESPACE)
_load()
