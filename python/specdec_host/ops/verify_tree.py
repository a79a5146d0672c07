"""Verification of a tree of drafted tokens. specdec_kernels/ops/verify_tree.py has the terms."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec_host import _library
from specdec_host.arguments import conversion
from specdec_host.arguments.arrays import Array, Param, require_array, require_array_or_none
from specdec_host.arguments.draft_forms import Draft, DraftMap, map_columns, split_draft
from specdec_host.arguments.rules import KINDS, TREE_RULES, Kind, TreeRule
from specdec_host.arguments.values import number_of, require_flag


class Tree(NamedTuple):
    """The drafted tokens below the root, in the form of `specdec_kernels.Tree`."""

    tokens: Array
    parents: Array


class TreeVerdict(NamedTuple):
    """The result of `verify_tree`, with the fields of `specdec_kernels.TreeVerdict`."""

    path: NDArray[Any]
    tokens: NDArray[Any]
    num_accepted: NDArray[np.int32]
    status: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    accept_probs: NDArray[np.float32]

    def rows(self) -> NDArray[np.int64]:
        """[B, max_depth+1]: the target row that gave each emitted token, then -1."""
        below = np.pad(self.path.astype(np.int64) + 1, ((0, 0), (1, 0)))
        return np.where(self.tokens >= 0, below, -1)


def verify_tree(
    target: Array,
    tree: Tree,
    draft: Draft = None,
    *,
    rule: TreeRule,
    draft_rows: Array | None = None,
    kind: Kind = "logits",
    temperature: Param = 1.0,
    top_k: int | Array = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    token_bitmask: Array | None = None,
    seeds: Array,
    positions: Array,
    target_indptr: Array | None = None,
    uniforms: Array | None = None,
    draft_map: DraftMap | None = None,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
    eos_token_ids: Array | None = None,
    max_new_tokens: Array | None = None,
    max_depth: int | None = None,
    with_logprobs: bool = True,
    with_accept_probs: bool = False,
) -> TreeVerdict:
    """Decide which path of a drafted tree is accepted, and sample the recovered or bonus token.

    The arguments are those of `specdec_kernels.verify_tree`, with arrays in place of tensors, and
    so are the bits of the results. specdec_kernels/ops/verify_tree.py documents both.

    Raises:
        RuntimeError: a shape, dtype or scalar is out of range, or a parameter that the rule
            does not read differs from its default; the message names it.
        TypeError: an argument has a wrong type, such as a tuple in place of a `Tree`.

    >>> rows = [[[0.0, 9.0, 1.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]]]
    >>> tree = Tree(np.array([[2, 1]]), np.array([[-1, -1]]))
    >>> one = np.zeros(1, dtype=np.int64)
    >>> v = verify_tree(np.float32(rows), tree, rule="greedy", seeds=one, positions=one)
    >>> v.path.tolist(), v.tokens.tolist()
    ([[1, -1]], [[1, 2, -1]])
    """
    if not isinstance(tree, Tree):
        raise TypeError(f"tree must be a Tree, got {type(tree).__name__}")
    tokens = require_array(tree.tokens, "tree tokens")
    parents = require_array(tree.parents, "tree parents")
    rows, ids, *statistics = split_draft(draft)
    if max_depth is None:
        max_depth = tokens.shape[-1] if tokens.ndim else 0  # the op names the shape
    return TreeVerdict(
        *_library.verify_tree(
            require_array(target, "target"),
            tokens,
            parents,
            rows,
            ids,
            map_columns(draft_map),
            *statistics,
            require_array_or_none(draft_rows, "draft_rows"),
            number_of(kind, "kind", KINDS),
            number_of(rule, "rule", TREE_RULES),
            *conversion.sampling(temperature, top_k, top_p, min_p),
            require_array_or_none(token_bitmask, "token_bitmask"),
            require_array(seeds, "seeds"),
            require_array(positions, "positions"),
            require_array_or_none(target_indptr, "target_indptr"),
            require_array_or_none(uniforms, "uniforms"),
            conversion.require_number(typical_epsilon, "typical_epsilon"),
            conversion.require_number(typical_delta, "typical_delta"),
            require_array_or_none(eos_token_ids, "eos_token_ids"),
            require_array_or_none(max_new_tokens, "max_new_tokens"),
            conversion.require_integer(max_depth, "max_depth"),
            require_flag(with_logprobs, "with_logprobs"),
            require_flag(with_accept_probs, "with_accept_probs"),
        )
    )
