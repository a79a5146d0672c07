"""The layout of token trees: attention masks, the best nodes of a tree, prefix trees.

Each sequence has a tree of N nodes below a root, which is the pending token: the last one emitted,
not yet in the cache. `parents[b, n]` is in [-1, n), where -1 is the root; a parent outside this
range counts as -1. A node with `tokens[b, n]` of -1 is absent, and so are its descendants. One
forward of the target takes N+1 tokens: row 0 is the root, row n+1 is node n. The root is written to
cache slot `lengths[b]`, node n to slot `lengths[b] + 1 + n`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.validation import fake_kernel
from ..arguments.values import require_flag


class TreeAttention(NamedTuple):
    """The result of `tree_attention`.

    Attributes:
        mask: [B, N+1, S] bool, True where the row (root, then nodes) attends to the slot.
        positions: [B, N+1] int64, `lengths[b]` + depth; the root has depth 0.
    """

    mask: Tensor
    positions: Tensor


class RankedTree(NamedTuple):
    """The result of `rerank_tree`: a tree of `size` nodes.

    Attributes:
        tokens: [B, size] in the dtype given, -1 where there is no node.
        parents: [B, size] in the dtype given, as indices into the chosen nodes.
        nodes: [B, size] in the dtype of parents, the index of each node among the candidates or -1.
    """

    tokens: Tensor
    parents: Tensor
    nodes: Tensor


class Trie(NamedTuple):
    """The result of `build_trie`: a tree of N nodes.

    Attributes:
        tokens: [B, N] in the dtype given, -1 from `num_nodes` on.
        parents: [B, N] int32.
        nodes: [B, K, L] int32, the node of each token of each continuation; -1 where there is none.
        num_nodes: [B] int32.
    """

    tokens: Tensor
    parents: Tensor
    nodes: Tensor
    num_nodes: Tensor


def tree_attention(
    parents: Tensor, lengths: Tensor, *, slots: int, window: int = 0
) -> TreeAttention:
    """The attention mask and the position ids for one forward of the target over a tree.

    Every row attends to the committed prefix (slots below `lengths[b]`), the root, its own
    ancestors and itself. An absent node has a row like any other.

    Args:
        parents: [B, N] int32 or int64.
        lengths: [B] int32 or int64, committed tokens in the cache; a negative one counts as 0.
        slots: S, the cache slots that the mask covers. At least `lengths[b] + N + 1`; a node whose
            slot lies beyond is attended to by no row.
        window: for sliding-window attention: a row attends only to keys whose position is greater
            than its own minus `window`; 0 means no window. Slot s of the prefix has position s.

    Raises:
        RuntimeError: a shape, dtype, device or size is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of a tensor.

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
    conversion.require_tensors(parents=parents, lengths=lengths)
    conversion.require_integer(slots, "slots")
    conversion.require_integer(window, "window")
    return TreeAttention(*ops.tree_attention.default(parents, lengths, slots, window))


@fake_kernel("tree_attention")
def _(parents: Tensor, lengths: Tensor, slots: int, window: int) -> tuple[Tensor, ...]:
    b, n = parents.shape
    return (
        parents.new_empty((b, n + 1, slots), dtype=torch.bool),
        parents.new_empty((b, n + 1), dtype=torch.int64),
    )


def rerank_tree(tokens: Tensor, parents: Tensor, scores: Tensor, *, size: int) -> RankedTree:
    """The best nodes of a tree of candidates, as a smaller tree: the re-ranking of EAGLE-2.

    Nodes are ranked by the smallest score on their path from the root, so that the ancestors of a
    chosen node are chosen too; ties go to the lower index. The chosen nodes keep their order. A
    node is never chosen if its token is -1, if its score is NaN or -inf, or if an ancestor is such
    a node.

    Args:
        tokens: [B, M] int32 or int64.
        parents: [B, M] int32 or int64.
        scores: [B, M] float32, as `expand_tree` gives them.
        size: how many nodes to choose; where there are fewer, the rest are absent.

    Raises:
        RuntimeError: a shape, dtype, device or size is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of a tensor.

    Source: EAGLE-2 (arXiv 2406.16858, section 4.2).

    >>> tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([[-1, -1, 1]])
    >>> rerank_tree(tokens, parents, torch.tensor([[-3.0, -1.0, -2.0]]), size=2)
    RankedTree(tokens=tensor([[6, 7]]), parents=tensor([[-1,  0]]), nodes=tensor([[1, 2]]))
    """
    conversion.require_tensors(tokens=tokens, parents=parents, scores=scores)
    conversion.require_integer(size, "size")
    return RankedTree(*ops.rerank_tree.default(tokens, parents, scores, size))


@fake_kernel("rerank_tree")
def _(tokens: Tensor, parents: Tensor, scores: Tensor, size: int) -> tuple[Tensor, ...]:
    b = tokens.shape[0]
    return tuple(t.new_empty((b, size)) for t in (tokens, parents, parents))


def build_trie(sequences: Tensor, *, size: int | None = None, merge: bool = True) -> Trie:
    """One prefix tree from several drafted continuations of each sequence of the batch.

    Nodes are numbered in the order of their first occurrence, so the first continuation is a chain
    at the front. When the nodes are used up, the rest of a continuation is dropped.

    Args:
        sequences: [B, K, L] int32 or int64, K continuations of up to L tokens; -1 ends one.
        size: N, the nodes of the result; None means K * L, which always suffices.
        merge: whether continuations share the nodes of a common prefix. False keeps each as a chain
            of its own, for sampled drafts: a token that was sampled twice is tried twice.

    Raises:
        RuntimeError: a shape, dtype or size is out of range; the message names it.
        TypeError: an argument has a wrong type, such as a list in place of a tensor.

    Source: SpecInfer (arXiv 2305.09781, section 3), REST (arXiv 2311.08252, section 3.2).

    >>> trie = build_trie(torch.tensor([[[5, 6], [5, 7]]]))
    >>> trie.tokens, trie.parents
    (tensor([[ 5,  6,  7, -1]]), tensor([[-1,  0,  0, -1]], dtype=torch.int32))
    >>> trie.nodes
    tensor([[[0, 1],
             [0, 2]]], dtype=torch.int32)
    """
    conversion.require_tensor(sequences, "sequences")
    if size is None:
        size = sequences.shape[-2] * sequences.shape[-1] if sequences.dim() == 3 else 0
    conversion.require_integer(size, "size")
    require_flag(merge, "merge")
    return Trie(*ops.build_trie.default(sequences, size, merge))


@fake_kernel("build_trie")
def _(sequences: Tensor, size: int, merge: bool) -> tuple[Tensor, ...]:
    b = sequences.shape[0]
    return (
        sequences.new_empty((b, size)),
        sequences.new_empty((b, size), dtype=torch.int32),
        sequences.new_empty(sequences.shape, dtype=torch.int32),
        sequences.new_empty((b,), dtype=torch.int32),
    )
