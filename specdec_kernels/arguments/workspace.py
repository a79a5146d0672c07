"""The sizes of workspaces, in which CUDA kernels work and which callers own.

docs/ops.md#persistent-buffers says how a workspace is used.
"""

from __future__ import annotations

import torch

from .._ops import ops
from . import conversion
from .rules import RULES, TREE_RULES, Rule, TreeRule
from .values import number_of


def sample_workspace_bytes(rows: int, vocab: int, *, device: torch.device | str = "cuda") -> int:
    """The size in bytes of a workspace with which `sample` allocates nothing.

    It suffices for every call with at most so many rows and entries of a row, and is 0 where the
    op needs none: on a CPU, and without the CUDA kernels.

    Args:
        rows: R, at least 0.
        vocab: V, at least 1.
        device: where the rows are.

    Raises:
        RuntimeError: a number is out of range; the message names it.
        TypeError: a number is no integer.

    >>> sample_workspace_bytes(8, 32000, device="cpu")
    0
    """
    needed = ops.sample_workspace_bytes.default(
        conversion.require_integer(rows, "rows"), conversion.require_integer(vocab, "vocab")
    )
    return _on(device, needed)


def verify_chain_workspace_bytes(
    batch: int,
    gamma: int,
    vocab: int,
    *,
    rule: Rule = "token",
    device: torch.device | str = "cuda",
) -> int:
    """The size in bytes of a workspace with which `verify_chain` allocates nothing.

    It suffices for every call under the rule with at most so many sequences, drafts and entries of
    a row, whatever the dtypes, the form of the draft and the sampling parameters are. It is 0 where
    the op needs none: on a CPU, and without the CUDA kernels.

    Args:
        batch: B, at least 0.
        gamma: the most drafts of a sequence, at least 0.
        vocab: the entries of a row, at least 1: the larger one of V and D.
        rule: one of `RULES`.
        device: where the rows are.

    Raises:
        RuntimeError: a number is out of range or a rule unknown; the message names it.
        TypeError: a number is no integer, or the rule no string.

    >>> verify_chain_workspace_bytes(8, 5, 32000, device="cpu")
    0
    """
    needed = ops.verify_chain_workspace_bytes.default(
        conversion.require_integer(batch, "batch"),
        conversion.require_integer(gamma, "gamma"),
        conversion.require_integer(vocab, "vocab"),
        number_of(rule, "rule", RULES),
    )
    return _on(device, needed)


def verify_tree_workspace_bytes(
    batch: int,
    nodes: int,
    vocab: int,
    *,
    rule: TreeRule,
    device: torch.device | str = "cuda",
) -> int:
    """The size in bytes of a workspace with which `verify_tree` allocates nothing.

    It suffices for every call under the rule with at most so many sequences, drafts and entries of
    a row, whatever the dtypes, the form of the draft and the sampling parameters are. It is 0 where
    the op needs none: on a CPU, and without the CUDA kernels.

    Args:
        batch: B, at least 0.
        nodes: N, the nodes of a tree, at least 0.
        vocab: the entries of a row, at least 1: the larger one of V and D.
        rule: one of `TREE_RULES`.
        device: where the rows are.

    Raises:
        RuntimeError: a number is out of range or a rule unknown; the message names it.
        TypeError: a number is no integer, or the rule no string.

    >>> verify_tree_workspace_bytes(8, 5, 32000, rule="multi_draft", device="cpu")
    0
    """
    needed = ops.verify_tree_workspace_bytes.default(
        conversion.require_integer(batch, "batch"),
        conversion.require_integer(nodes, "nodes"),
        conversion.require_integer(vocab, "vocab"),
        number_of(rule, "rule", TREE_RULES),
    )
    return _on(device, needed)


def _on(device: torch.device | str, needed: int) -> int:
    return needed if torch.device(device).type == "cuda" else 0
