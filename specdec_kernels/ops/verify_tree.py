"""Verification of a tree of drafted tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.arguments import conversion as _params
from specdec_kernels.arguments.conversion import Param
from specdec_kernels.arguments.rules import TreeRule
from specdec_kernels.arguments.tree import TreeArguments
from specdec_kernels.ops.verify_chain import (
    DraftMap,
    Kind,
    SampledDraft,
    SparseDraft,
    map_columns,
    split_draft,
)


class Tree(NamedTuple):
    """Drafted tokens below a root, the pending token, which is not part of it.

    tokens: [B, N] int32 or int64; -1 is an absent node, and nothing hangs below it.
    parents: [B, N] int32 or int64, the parent of each node, in [-1, n): -1 is the root. Nodes come
        in topological order; siblings are tried in the order of their numbers. A chain is the tree
        with parents -1, 0, 1, ...
    """

    tokens: Tensor
    parents: Tensor


class TreeVerdict(NamedTuple):
    """What `verify_tree` returns.

    path: [B, max_depth] in the dtype of parents: the accepted nodes from the root on, then -1.
    tokens: [B, max_depth+1] in the dtype of the tree's tokens: those of the path, one more token
        (none after an end-of-sequence token or at `max_new_tokens`), then -1.
    num_accepted: [B] int32, the nodes on the path.
    status: [B] int32, bits as in `Verdict`; bit 3 also for a parent out of range.
    logprobs: [B, max_depth+1] float32, of emitted tokens under the filtered target; 0 at
        temperature 0 and where nothing was emitted. Empty if not asked for.
    accept_probs: [B, N] float32, the probability with which each node was to be accepted, given that
        the rule came to it: of rule target_only P of its token, of greedy and match 0 or 1. NaN
        where the rule did not look. Empty if not asked for.
    """

    path: Tensor
    tokens: Tensor
    num_accepted: Tensor
    status: Tensor
    logprobs: Tensor
    accept_probs: Tensor


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
) -> TreeVerdict:
    """Decide which path of a drafted tree stands and sample the one token that follows it.

    Every rule but traversal walks down from the root and reads only the rows of the nodes it
    accepts; to it, nodes whose tokens spell the same path are one node with the children of all of
    them. Rules multi_draft and k_seq try siblings of the same token one after the other, for each
    was drawn by itself, and multi_draft_wor those of different parents or rows of `draft`; to the
    other rules that walk they are one. Not differentiable. At temperature 0 every rule is greedy.

    Args:
        target: [B, N+1, V] float32, bfloat16 or float16, or ragged [R, V] with `target_indptr`; row 0
            judges the children of the root, row n+1 those of node n. The last dimension is
            contiguous.
        tree: [B, N] tokens and parents.
        draft: the laws that nodes were drawn from: None (point masses), a tensor [B, N, D] or, with
            `draft_rows`, [B, M, D] or [M, D] of what `kind` says, a `SampledDraft` or a
            `SparseDraft`; forms as in `verify_chain`, all for the law of one draw, so that of
            siblings drawn without replacement each has the law of the first. Only the ratio rules
            read it: multi_draft, multi_draft_wor, top_k_plus_one, k_seq, traversal.
        rule: lossless are
            "greedy": the child that is the argmax; temperature ignored.
            "match": the child that the target draws with shared noise, as in `verify_chain`.
            "target_only": a token drawn from the target, and the child that is it, if there is one.
                For children that were not sampled: nothing accepts more of them.
            "multi_draft": siblings drawn independently, each from its own law, tried one by one
                against what the target has left after those before it.
            "multi_draft_wor": the same for siblings drawn without replacement. Of those of one
                parent and one law, the last ones may be absent, no others.
            "top_k_plus_one": siblings that are the most likely tokens of their law but the last
                one, which was drawn from the others. All of a node's children or none.
            "k_seq": siblings drawn independently from one law, each tried against the whole target.
            "traversal": siblings as for multi_draft, judged from the leaves to the root; on a chain
                it is rule block. Siblings of the same token keep their own children.
            Lossy is "typical": of the children that are likely enough, the likeliest.
        draft_rows: [B, N] int32, the row of `draft` that node n was drawn from; None is row n.
            Siblings with one row share one law.
        kind: "logits" or "probs", as in `verify_chain`.
        temperature, top_k, top_p, min_p: scalar or [B], as in `sample`; they shape the target.
        seeds: [B] int64.
        positions: [B] int64, the absolute index of the root's children; what stands at depth d
            draws with (seed, position + d).
        target_indptr: [B+1] int32, row target_indptr[b] is the root's, row target_indptr[b]+n+1 that of node n; nodes
            without a row are absent.
        uniforms: [B, 2N+1] float64 in [0, 1), for tests: column n is the coin of node n, column
            N+d draws the token at depth d.
        draft_map: as in `verify_chain`.
        typical_epsilon, typical_delta: rule typical accepts `P(x) > min(epsilon, delta * exp(-H))`
            with H the entropy of P.
        eos_token_ids: [E] int64; nothing is emitted after one of them.
        max_new_tokens: [B] int64, at most so many tokens; 0 or less emits nothing.
        max_depth: nodes deeper than it (the root's children have depth 1) are not judged; the
            width of the outputs. None is N.
        with_logprobs, with_accept_probs: which optional outputs to compute.

    Raises:
        RuntimeError: a shape, dtype, device or scalar out of range, with its name and value.
        ValueError: an argument of a wrong type.

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
        raise ValueError(f"tree must be a Tree, got {type(tree).__name__}")
    _params.tensor(tree.tokens, "tree tokens")
    _params.tensor(tree.parents, "tree parents")
    rows, ids, *law = split_draft(draft)
    _params.tensors(target=target, seeds=seeds, positions=positions)
    _params.optional(
        draft_rows=draft_rows, target_indptr=target_indptr, uniforms=uniforms, eos_token_ids=eos_token_ids,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    return TreeVerdict(
        *torch.ops.specdec_kernels.verify_tree.default(
            target,
            tree.tokens,
            tree.parents,
            rows,
            ids,
            map_columns(draft_map),
            *law,
            draft_rows,
            kind,
            rule,
            *_params.sampling(temperature, top_k, top_p, min_p),
            seeds,
            positions,
            target_indptr,
            uniforms,
            typical_epsilon,
            typical_delta,
            eos_token_ids,
            max_new_tokens,
            tree.tokens.shape[-1] if max_depth is None else max_depth,
            with_logprobs,
            with_accept_probs,
        )
    )


@torch.library.register_fake("specdec_kernels::verify_tree")
def _(*args: Any) -> tuple[Tensor, ...]:
    arguments = TreeArguments(*args)
    arguments.check()
    return arguments.new_outputs()
