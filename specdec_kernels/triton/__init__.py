"""Triton provider for CUDA devices (and the CPU interpreter).

Nothing here imports triton until an op is first called: the import costs about a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MODULES", "register"]

# Op -> the module of this package that has a function of its name.
MODULES = {
    "sample": "row.sample",
    "verify_chain": "chain.verify_chain",
    "verify_tree": "tree.verify_tree",
    "tree_attention": "tree.layout",
    "rerank_tree": "tree.layout",
    "build_trie": "tree.layout",
    "expand_tree": "tree.expand_tree",
    "kv_append_": "kv.append",
    "kv_truncate_": "kv.truncate",
    "kv_compact_": "kv.compact",
    "paged_compact_": "kv.compact",
    "kv_realign_": "kv.realign",
    "ring_truncate_": "kv.ring_truncate",
    "paged_truncate_": "kv.paged_truncate",
}

_libraries: dict[str, torch.library.Library] = {}


def _on_call(op: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{MODULES[op]}"), op)(*args)

    return call


def register(op: str, dispatch_key: str = "CUDA") -> None:
    """Serve an op on `dispatch_key`; its schema must be there. A second call changes nothing."""
    if op in _libraries:
        return
    library = torch.library.Library("specdec_kernels", "IMPL")
    library.impl(op, _on_call(op), dispatch_key)
    # A registration lives as long as the object that made it.
    _libraries[op] = library
