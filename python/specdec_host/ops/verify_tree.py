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


class Tree(NamedTuple):
    """The drafted tokens below the root; the root itself is not among them.

    tokens: [B, N] int32 or int64; -1 marks an absent node, and its descendants are absent too.
    parents: [B, N] int32 or int64, the parent of node n, in [-1, n); -1 is the root. Siblings are
        tried in the order of their numbers.
    """

    tokens: Array
    parents: Array


class TreeVerdict(NamedTuple):
    """The result of `verify_tree`.

    path: [B, max_depth] in the dtype of parents: the accepted nodes from the root downwards, then
        -1.
    tokens: [B, max_depth+1] in the dtype of the tree's tokens: those of the path, then the
        recovered or bonus token, then -1.
    num_accepted: [B] int32, the nodes on the path.
    status: [B] int32, the `Status` bits of each sequence; 0 where its data has no fault.
    logprobs: [B, max_depth+1] float32, the log-probability of each emitted token under P. Empty if
        not asked for.
    accept_probs: [B, N] float32, the acceptance probability of each node, given that the rule
        reached it; NaN for nodes that it did not look at. Empty if not asked for.
    """

    path: NDArray[Any]
    tokens: NDArray[Any]
    num_accepted: NDArray[np.int32]
    status: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    accept_probs: NDArray[np.float32]


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
    so are the results.

    Args:
        target: [B, N+1, V] float32, bfloat16 or float16, or ragged [R, V] with `target_indptr`.
            Row 0 verifies the children of the root, row n+1 the children of node n. The last
            dimension must be contiguous.
        tree: tokens and parents of the nodes, [B, N] each.
        draft: Q, the distributions that the nodes were sampled from: None (deterministic: one-hot
            at each node's token), an array [B, N, D] or, with `draft_rows`, [B, M, D] or [M, D] of
            what `kind` says, a `SampledDraft` or a `SparseDraft`.
        rule: one of `TREE_RULES`; docs/rules.md gives their formulas and says how the nodes of each
            are drawn. All are lossless but "typical".
        draft_rows: [B, N] int32 or int64, the row of `draft` that node n was sampled from; None
            means row n. Siblings with the same row share one Q.
        kind: "logits" or "probs", as in `verify_chain`.
        temperature, top_k, top_p, min_p: scalar or [B], the sampling parameters of the target, as
            in `sample`.
        seeds: [B] int32 or int64.
        positions: [B] int32 or int64, the absolute index of the root's children.
        target_indptr: [B+1] int32 or int64; row target_indptr[b] is the root's, row
            target_indptr[b]+n+1 that of node n. Nodes without a row are absent.
        uniforms: [B, 2N+1] float64 in [0, 1), in place of random numbers, for tests.
        draft_map: as in `verify_chain`.
        typical_epsilon, typical_delta: rule typical accepts x if
            `P(x) > min(epsilon, delta * exp(-H))` with H the entropy of P.
        eos_token_ids: [E] int32 or int64; nothing is emitted after one of them.
        max_new_tokens: [B] int32 or int64, how many tokens may be emitted; 0 or less emits nothing.
        max_depth: the width of the outputs; deeper nodes are never accepted. None means N.
        with_logprobs, with_accept_probs: whether to compute these outputs.

    Raises:
        RuntimeError: a shape, dtype or scalar is out of range, or a parameter that the rule
            does not read differs from its default; the message names it.
        TypeError: an argument has a wrong type, such as a tuple in place of a `Tree`.

    Source: multi_draft: Miao et al. 2023 (SpecInfer). multi_draft_wor: Chen et al. 2024 (Sequoia).
    k_seq: Sun et al. 2023 (SpecTr). traversal: arXiv 2505.12398. typical: Cai et al. 2024 (Medusa).

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
            conversion.number_of(kind, "kind", KINDS),
            conversion.number_of(rule, "rule", TREE_RULES),
            *conversion.sampling(temperature, top_k, top_p, min_p),
            require_array(seeds, "seeds"),
            require_array(positions, "positions"),
            require_array_or_none(target_indptr, "target_indptr"),
            require_array_or_none(uniforms, "uniforms"),
            conversion.require_number(typical_epsilon, "typical_epsilon"),
            conversion.require_number(typical_delta, "typical_delta"),
            require_array_or_none(eos_token_ids, "eos_token_ids"),
            require_array_or_none(max_new_tokens, "max_new_tokens"),
            conversion.require_integer(max_depth, "max_depth"),
            conversion.require_flag(with_logprobs, "with_logprobs"),
            conversion.require_flag(with_accept_probs, "with_accept_probs"),
        )
    )
