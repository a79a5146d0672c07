"""The layout of token trees: who sees whom, the best nodes of a tree, prefix trees.

A tree of N nodes a sequence hangs below a root, the pending token: the last committed one, not yet
in the cache. `parents[b, n]` is in [-1, n), and -1 is a child of the root; a parent outside this
range counts as -1. `tokens[b, n]` of -1 is an absent node, with all that hangs below it. One pass
of the target feeds N+1 tokens: row 0 is the root, row n+1 is node n. The root goes to cache slot
`lengths[b]`, node n to `lengths[b] + 1 + n`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments import conversion as _params
from specdec_kernels.arguments import tree_layout as _checks


class TreeAttention(NamedTuple):
    """What `tree_attention` returns.

    mask: [B, N+1, S] bool, True where the row (root, then nodes) sees the slot.
    positions: [B, N+1] int64, `lengths[b]` + depth; the root has depth 0.
    """

    mask: Tensor
    positions: Tensor


class RankedTree(NamedTuple):
    """What `rerank_tree` returns: a tree of `size` nodes.

    tokens: [B, size], -1 where there is no node.
    parents: [B, size], among the chosen nodes, in the dtype given.
    nodes: [B, size], the index of each among the candidates or -1, in the dtype of parents.
    """

    tokens: Tensor
    parents: Tensor
    nodes: Tensor


class Trie(NamedTuple):
    """What `build_trie` returns: a tree of N nodes.

    tokens: [B, N], -1 from `num_nodes` on, in the dtype given.
    parents: [B, N] int32.
    nodes: [B, K, L] int32, the node of each token of each sequence; -1 where there is none.
    num_nodes: [B] int32.
    """

    tokens: Tensor
    parents: Tensor
    nodes: Tensor
    num_nodes: Tensor


def tree_attention(
    parents: Tensor, lengths: Tensor, *, slots: int, window: int = 0
) -> TreeAttention:
    """The attention mask and the positions with which a target scores a tree in one pass.

    Every row sees the committed prefix (slots below `lengths[b]`), the root, its own ancestors and
    itself. A node whose token is absent has a row like any other.

    Args:
        parents: [B, N] int32 or int64.
        lengths: [B] int64, committed tokens in the cache; a negative one counts as 0.
        slots: S, the slots of the cache that the mask covers; `lengths[b] + N + 1` at least, for
            what lies beyond is in nobody's sight.
        window: of sliding attention: a row sees only keys whose position is greater than its own
            minus `window`; 0 sees all. Slot s of the prefix has position s.

    Raises:
        RuntimeError: a shape, dtype, device or size out of range, with its name and value.
        ValueError: an argument that is no tensor.

    Source: the tree attention of SpecInfer (arXiv 2305.09781, section 4.2) and Medusa.

    >>> mask, positions = tree_attention(torch.tensor([[-1, -1, 0]]), torch.tensor([1]), slots=5)
    >>> mask[0].int()
    tensor([[1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [1, 1, 1, 0, 1]], dtype=torch.int32)
    >>> positions
    tensor([[1, 2, 2, 3]])
    """
    _params.tensors(parents=parents, lengths=lengths)
    return TreeAttention(
        *torch.ops.specdec_kernels.tree_attention.default(parents, lengths, slots, window)
    )


def rerank_tree(tokens: Tensor, parents: Tensor, scores: Tensor, *, size: int) -> RankedTree:
    """The best nodes of a tree of candidates, as a tree: the re-rank of EAGLE-2.

    A node counts with the smallest score on its way to the root, so that what is chosen hangs
    together; ties go to the lower index. The chosen nodes keep their order. A node is never chosen
    if its token is -1, its score NaN or -inf, or one above it is such a node.

    Args:
        tokens: [B, M] int32 or int64.
        parents: [B, M] int32 or int64.
        scores: [B, M] float32, as `expand_tree` gives them.
        size: nodes to choose; where there are fewer, the rest are absent.

    Raises:
        RuntimeError: a shape, dtype, device or size out of range, with its name and value.
        ValueError: an argument that is no tensor.

    Source: EAGLE-2 (arXiv 2406.16858, section 4.2).

    >>> tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([[-1, -1, 1]])
    >>> rerank_tree(tokens, parents, torch.tensor([[-3.0, -1.0, -2.0]]), size=2)
    RankedTree(tokens=tensor([[6, 7]]), parents=tensor([[-1,  0]]), nodes=tensor([[1, 2]]))
    """
    _params.tensors(tokens=tokens, parents=parents, scores=scores)
    return RankedTree(*torch.ops.specdec_kernels.rerank_tree.default(tokens, parents, scores, size))


def build_trie(sequences: Tensor, *, size: int | None = None, merge: bool = True) -> Trie:
    """One prefix tree of several drafted sequences.

    Nodes are numbered in order of first appearance, sequence by sequence: sequence 0 is a chain at
    the front. Where there is no room for a node, the rest of its sequence is dropped.

    Args:
        sequences: [B, K, L] int32 or int64, K sequences of up to L tokens; -1 ends one.
        size: N, the nodes to make room for; None is K * L, which always suffices.
        merge: sequences share the nodes of a common prefix. False keeps each as a chain of its own,
            for sampled drafts: a token that was drawn twice is two trials.

    Raises:
        RuntimeError: a shape, dtype or size out of range, with its name and value.
        ValueError: sequences is not a tensor.

    Source: SpecInfer (arXiv 2305.09781, section 3), REST (arXiv 2311.08252, section 3.2).

    >>> trie = build_trie(torch.tensor([[[5, 6], [5, 7]]]))
    >>> trie.tokens, trie.parents
    (tensor([[ 5,  6,  7, -1]]), tensor([[-1,  0,  0, -1]], dtype=torch.int32))
    >>> trie.nodes
    tensor([[[0, 1],
             [0, 2]]], dtype=torch.int32)
    """
    _params.tensor(sequences, "sequences")
    if size is None:
        size = sequences.shape[-2] * sequences.shape[-1] if sequences.dim() == 3 else 0
    return Trie(*torch.ops.specdec_kernels.build_trie.default(sequences, size, merge))


@torch.library.register_fake("specdec_kernels::tree_attention")
def _(parents: Tensor, lengths: Tensor, slots: int, window: int) -> tuple[Tensor, ...]:
    _checks.tree_attention(parents, lengths, slots, window)
    b, n = parents.shape
    return (
        parents.new_empty((b, n + 1, slots), dtype=torch.bool),
        parents.new_empty((b, n + 1), dtype=torch.int64),
    )


@torch.library.register_fake("specdec_kernels::rerank_tree")
def _(tokens: Tensor, parents: Tensor, scores: Tensor, size: int) -> tuple[Tensor, ...]:
    _checks.rerank_tree(tokens, parents, scores, size)
    b = tokens.shape[0]
    return tuple(t.new_empty((b, size)) for t in (tokens, parents, parents))


@torch.library.register_fake("specdec_kernels::build_trie")
def _(sequences: Tensor, size: int, merge: bool) -> tuple[Tensor, ...]:
    _checks.build_trie(sequences, size)
    b = sequences.shape[0]
    return (
        sequences.new_empty((b, size)),
        sequences.new_empty((b, size), dtype=torch.int32),
        sequences.new_empty(sequences.shape, dtype=torch.int32),
        sequences.new_empty((b,), dtype=torch.int32),
    )
