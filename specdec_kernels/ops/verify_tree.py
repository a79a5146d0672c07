"""Verification of a tree of drafted tokens.

The *root* of the tree is the pending token: the last one emitted, not yet in the cache. A *node* is
a drafted token; its *parent* is another node or the root. Nodes with one parent are *siblings*. The
accepted nodes always form a *path* from the root downwards. Otherwise the terms are those defined
in verify_chain.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.conversion import Param
from ..arguments.draft_forms import (
    DraftMap,
    SampledDraft,
    SparseDraft,
    map_columns,
    split_draft,
)
from ..arguments.out import write_out
from ..arguments.rules import KINDS, TREE_RULES, Kind, TreeRule
from ..arguments.tree import TreeArguments
from ..arguments.validation import fake_kernel
from ..arguments.values import number_of, require_flag


class Tree(NamedTuple):
    """The drafted tokens below the root; the root itself is not among them.

    Attributes:
        tokens: [B, N] int32 or int64; -1 marks an absent node, and its descendants are absent too.
        parents: [B, N] int32 or int64, the parent of node n, in [-1, n); -1 is the root. So parents
            come before their children. Siblings are tried in the order of their numbers. The tree
            with parents -1, 0, 1, ... is a chain.
    """

    tokens: Tensor
    parents: Tensor


class TreeVerdict(NamedTuple):
    """The result of `verify_tree`.

    Attributes:
        path: [B, max_depth] in the dtype of parents: the accepted nodes from the root downwards,
            then -1.
        tokens: [B, max_depth+1] in the dtype of the tree's tokens: those of the path, then the
            recovered or bonus token, then -1. No such token follows an end-of-sequence token or
            `max_new_tokens` tokens.
        num_accepted: [B] int32, the nodes on the path.
        status: [B] int32, the `Status` bits of each sequence; 0 where its data has no fault.
        logprobs: [B, max_depth+1] float32, the log-probability of each emitted token under P; 0 at
            temperature 0 and where nothing was emitted. Empty if not asked for.
        accept_probs: [B, N] float32, the acceptance probability of each node, given that the rule
            reached it: P of its token for rule target_only, 0 or 1 for greedy and match. NaN for
            nodes that the rule did not look at. Empty if not asked for.
    """

    path: Tensor
    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor
    accept_probs: Tensor

    def rows(self) -> Tensor:
        """[B, max_depth+1] int64: the target row that gave each emitted token, then -1.

        `kept_tokens` takes them.
        """
        below = torch.nn.functional.pad(self.path.long() + 1, (1, 0))
        return torch.where(self.tokens >= 0, below, -1)


def verify_tree(
    target: Tensor,
    tree: Tree,
    draft: Tensor | SampledDraft | SparseDraft | None = None,
    *,
    rule: TreeRule,
    draft_rows: Tensor | None = None,
    kind: Kind = "logits",
    temperature: Param = 1.0,
    top_k: int | Tensor = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    token_bitmask: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    target_indptr: Tensor | None = None,
    uniforms: Tensor | None = None,
    draft_map: DraftMap | None = None,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
    eos_token_ids: Tensor | None = None,
    max_new_tokens: Tensor | None = None,
    max_depth: int | None = None,
    with_logprobs: bool = True,
    with_accept_probs: bool = False,
    out: TreeVerdict | None = None,
    workspace: Tensor | None = None,
) -> TreeVerdict:
    """Decide which path of a drafted tree is accepted, and sample the recovered or bonus token.

    Every rule but "traversal" goes down from the root and reads only the rows of the nodes that it
    accepts. These rules merge nodes whose tokens spell the same path: such nodes count as one, with
    the children of all of them. Three rules keep siblings with the same token apart, because each
    was sampled by itself: multi_draft and k_seq try them one after the other, multi_draft_wor those
    of different parents or different rows of `draft`. At temperature 0 every rule decides as
    "greedy" does. The op is not differentiable.

    Args:
        target: [B, N+1, V] float32, bfloat16 or float16, or ragged [R, V] with `target_indptr`.
            Row 0 verifies the children of the root, row n+1 the children of node n. The last
            dimension must be contiguous.
        tree: tokens and parents of the nodes, [B, N] each.
        draft: Q, the distributions that the nodes were sampled from: None (deterministic: one-hot
            at each node's token), a tensor [B, N, D] or, with `draft_rows`, [B, M, D] or [M, D] of
            what `kind` says, a `SampledDraft` or a `SparseDraft`, in the forms of `verify_chain`.
            A row is the distribution of one draw: siblings that were sampled without replacement
            all have that of the first. Only `TREE_RULES_READING_DRAFT` read it.
        rule: one of `TREE_RULES`; docs/rules.md gives their formulas. Lossless are
            "greedy": accepts the child that is the argmax; the temperature is ignored.
            "match": accepts the child that the target samples with the shared Gumbel noise, as in
                `verify_chain`.
            "target_only": samples a token from P and accepts the child that equals it. For children
                that were not sampled, such as the top k: no rule accepts more of them.
            "multi_draft": for siblings sampled independently, each from its own Q. They are tried
                one by one, each against the residual after those before it.
            "multi_draft_wor": the same for siblings sampled without replacement. Among the siblings
                with one parent and one Q only the last ones may be absent.
            "top_k_plus_one": for siblings that are the most likely tokens of their Q, except the
                last one, which was sampled from the other tokens. A node has all of these children
                or none.
            "k_seq": for siblings sampled independently from one Q, each tried against all of P.
            "traversal": for siblings as in multi_draft, decided from the leaves to the root. On a
                chain it equals rule block. Siblings with the same token keep their own children.
            Lossy is "typical": accepts the likeliest of the children that are likely enough.
        draft_rows: [B, N] int32 or int64, the row of `draft` that node n was sampled from; None
            means row n. Siblings with the same row share one Q.
        kind: "logits" or "probs", as in `verify_chain`.
        temperature, top_k, top_p, min_p: scalar or [B], the sampling parameters of the target, as
            in `sample`.
        token_bitmask: [B, N+1, ceil(V/32)] int32, or ragged [R, ceil(V/32)], which tokens a
            grammar allows after each row: bit v % 32 of word v // 32 is that of token v, as
            xgrammar and llguidance write it. Others have P = 0 before any filter, whatever their
            entry holds. None allows all.
        seeds: [B] int32 or int64.
        positions: [B] int32 or int64, the absolute index of the root's children. A token at depth d
            takes its randomness from (seed, position + d), except the acceptance uniforms of rule
            traversal, which belong to the round. Drafts are drawn at the positions of
            `draft_positions`; see docs/rules.md#noise.
        target_indptr: [B+1] int32 or int64; row target_indptr[b] is the root's, row
            target_indptr[b]+n+1 that of node n. Nodes without a row are absent.
        uniforms: [B, 2N+1] float64 in [0, 1), in place of random numbers, for tests. Column n is
            the acceptance uniform of node n, column N+d draws the token at depth d. Values out of
            range are a fault, as in `verify_chain`.
        draft_map: as in `verify_chain`.
        typical_epsilon, typical_delta: rule typical accepts x if
            `P(x) > min(epsilon, delta * exp(-H))` with H the entropy of P.
        eos_token_ids: [E] int32 or int64; nothing is emitted after one of them.
        max_new_tokens: [B] int32 or int64, how many tokens may be emitted; 0 or less emits nothing.
        max_depth: the width of the outputs. Deeper nodes are never accepted; the children of the
            root have depth 1. None means N.
        with_logprobs: whether to compute `logprobs`.
        with_accept_probs: whether to compute `accept_probs`.
        out: contiguous tensors of the shapes and dtypes of `TreeVerdict`, in which the results are
            written and which are returned: no tensor is allocated for them. What is not asked for
            is None or empty. None may overlap another or an argument.
            docs/ops.md#persistent-buffers.
        workspace: uint8 of at least `verify_tree_workspace_bytes`, for `out` on a CUDA device: the
            kernels work in it. It need not be cleared. None: the call allocates one.

    Raises:
        RuntimeError: a shape, dtype, device or scalar is out of range, or a parameter that the rule
            does not read differs from its default; the message names it.
        TypeError: an argument has a wrong type, such as a tuple in place of a `Tree`.

    Source: multi_draft: Miao et al. 2023 (SpecInfer). multi_draft_wor: Chen et al. 2024 (Sequoia).
    k_seq: Sun et al. 2023 (SpecTr). traversal: arXiv 2505.12398. typical: Cai et al. 2024 (Medusa).

    >>> target = torch.tensor([[[0.0, 9.0, 1.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]]])
    >>> tree = Tree(torch.tensor([[2, 1]]), torch.tensor([[-1, -1]]))
    >>> one = torch.zeros(1, dtype=torch.int64)
    >>> v = verify_tree(target, tree, rule="greedy", seeds=one, positions=one)
    >>> v.path, v.tokens
    (tensor([[ 1, -1]]), tensor([[ 1,  2, -1]]))
    """
    if not isinstance(tree, Tree):
        raise TypeError(f"tree must be a Tree, got {type(tree).__name__}")
    tokens = conversion.require_tensor(tree.tokens, "tree tokens")
    parents = conversion.require_tensor(tree.parents, "tree parents")
    rows, ids, *statistics = split_draft(draft)
    if max_depth is None:
        max_depth = tokens.shape[-1] if tokens.dim() else 0  # the op names the shape
    arguments = (
        conversion.require_tensor(target, "target"),
        tokens,
        parents,
        rows,
        ids,
        map_columns(draft_map),
        *statistics,
        conversion.require_tensor_or_none(draft_rows, "draft_rows"),
        number_of(kind, "kind", KINDS),
        number_of(rule, "rule", TREE_RULES),
        *conversion.sampling(temperature, top_k, top_p, min_p),
        conversion.require_tensor_or_none(token_bitmask, "token_bitmask"),
        conversion.require_tensor(seeds, "seeds"),
        conversion.require_tensor(positions, "positions"),
        conversion.require_tensor_or_none(target_indptr, "target_indptr"),
        conversion.require_tensor_or_none(uniforms, "uniforms"),
        conversion.require_number(typical_epsilon, "typical_epsilon"),
        conversion.require_number(typical_delta, "typical_delta"),
        conversion.require_tensor_or_none(eos_token_ids, "eos_token_ids"),
        conversion.require_tensor_or_none(max_new_tokens, "max_new_tokens"),
        conversion.require_integer(max_depth, "max_depth"),
        require_flag(with_logprobs, "with_logprobs"),
        require_flag(with_accept_probs, "with_accept_probs"),
    )
    if out is None and workspace is None:
        return TreeVerdict(*ops.verify_tree.default(*arguments))
    return write_out(ops.verify_tree_out.default, arguments, TreeVerdict, out, workspace)


@fake_kernel("verify_tree")
def _(*args: Any) -> tuple[Tensor, ...]:
    return TreeArguments(*args).new_outputs()


@fake_kernel("verify_tree_out")
def _(*args: Any) -> None:
    """Nothing is returned."""
