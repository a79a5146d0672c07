"""Cases of `verify_tree`: random trees, with nodes drawn from every form of the draft."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from proofs.case import (
    SHORT,
    Args,
    Case,
    any_positions,
    any_seeds,
    ending_limits,
    noisy_draft,
    packed_bits,
    ragged,
    sampling,
    sliced,
    some_allowed,
    spaced,
    verify_id,
    zipf_logits,
)
from proofs.chain import DraftInputs, make_draft, slice_draft, temperatures_of
from specdec_kernels.arguments.rules import KINDS, TREE_RULES, TREE_RULES_READING_DRAFT

i32, bf16, f16 = torch.int32, torch.bfloat16, torch.float16


def tree_case(
    b,
    n,
    v,
    dtype=torch.float32,
    rule="multi_draft",
    *,
    kind="logits",
    draft="full",
    rows="each",
    filters="off",
    layout="dense",
    chain=False,
    id_dtype=torch.int64,
    parent_dtype=torch.int64,
    acceptance=0.7,
    limits=False,
    mask=False,
    bare=False,
) -> Case:
    """A case of `verify_tree` with n nodes, some of them absent, some siblings of one token.

    draft: as in `chain_case`.
    rows: of the draft: "each" (every node has a row of its own), "shared" (siblings share a row)
        or "flat" (the same, with the rows of all sequences in one list).
    layout: "dense", "sliced" (views into wider tensors) or "ragged".
    limits: some sequences end by an end-of-sequence token, at `max_new_tokens` or at `max_depth`.
    mask: as in `chain_case`.
    """

    def build(g: Generator) -> Args:
        target = zipf_logits(b * (n + 1), v, g).view(b, n + 1, v)
        parents = _parents(b, n, chain, g)
        all_rows = torch.arange(n + 1).expand(b, n + 1)
        target_rows = parents + 1 if rows == "each" else all_rows
        after_parent = target.gather(1, target_rows[..., None].expand(-1, -1, v))
        near = noisy_draft(after_parent.reshape(-1, v), acceptance, g).view(after_parent.shape)
        target = target.to(dtype)
        params = sampling(filters, b, v, g)
        made = DraftInputs(torch.empty(0))
        if draft != "none":
            made = make_draft(draft, near.to(dtype), kind, temperatures_of(params, b), g, mask)
        row_of = torch.arange(n).expand(b, n) if rows == "each" else parents + 1
        drawn = rule in TREE_RULES_READING_DRAFT and draft != "none"
        probs, ids = target.float().softmax(-1), torch.arange(v)
        if drawn and made.probs is not None and made.column_ids is not None:
            probs, ids = made.probs, made.column_ids
        drawn_from = row_of if drawn else parents + 1
        tokens = _tokens(rule if drawn else "", parents, drawn_from, probs, ids, g)
        if b >= 3:
            tokens[2, n // 2 :: 3] = -1
        made.tokens = tokens.to(id_dtype)
        if made.ids is not None:
            made.ids = made.ids.to(id_dtype)
        if kind == "probs":
            target = target.float().softmax(-1).to(dtype)
        bitmask = None
        if mask:
            # Of every row some token, of most a child's.
            allowed = some_allowed(target.shape, tokens[:, :0], g)
            b_, n_ = (tokens >= 0).nonzero(as_tuple=True)
            inside = tokens[b_, n_] < v
            b_, n_ = b_[inside], n_[inside]
            allowed[b_, parents[b_, n_] + 1, tokens[b_, n_]] |= (
                torch.rand(len(b_), generator=g) < 0.9
            )
            target, bitmask = target.where(allowed, torch.nan), packed_bits(allowed)
        draft_rows = None if rows == "each" else row_of.to(torch.int32)
        if rows == "flat":
            draft_rows = made.flatten(row_of, n + 1)
        parents = parents.to(parent_dtype)
        noise = [any_seeds(b, g), any_positions(b, g)]
        target_indptr = None
        if layout == "ragged":
            used, target_indptr = ragged(b, n, g)
            target, bitmask = target[used], None if bitmask is None else bitmask[used]
        if layout == "sliced":
            target, parents = sliced(target), sliced(parents)
            bitmask = None if bitmask is None else sliced(bitmask)
            draft_rows = None if draft_rows is None else sliced(draft_rows)
            slice_draft(made)
            noise = [spaced(x) for x in noise]
        ends = ending_limits(made.tokens, 4, g) if limits else (None, None)
        return (
            *(target, made.tokens, parents, made.rows, made.ids, made.columns),
            *(made.logsumexp, made.threshold, made.temperatures, 1.0, made.bitmask),
            *(draft_rows, KINDS.index(kind), TREE_RULES.index(rule)),
            *(*params, bitmask, *noise, target_indptr, None, 0.09, 0.3, *ends),
            *(min(n, 2) if limits else n, not bare, not bare),
        )

    words = verify_id(
        [f"B{b}", f"N{n}", f"V{v}", SHORT[dtype], rule], [kind, draft, rows, filters, layout],
        chain=chain, i32=id_dtype == torch.int32, p32=parent_dtype == torch.int32, limits=limits,
        mask=mask, bare=bare,
    )  # fmt: skip
    return Case("verify_tree", words, build, b * (n + 1), v)


def _parents(b: int, n: int, chain: bool, g: Generator) -> Tensor:
    """[B, N]: the parent of each node is a random earlier node, more often a late one, or -1."""
    if chain:
        return torch.arange(-1, n - 1).expand(b, n).clone()
    two = torch.rand(b, n, 2, generator=g).sort(-1).values
    late = torch.rand(b, n, generator=g) < 0.5
    u = torch.where(late, two[..., 1], two[..., 0])
    return (u * torch.arange(1, n + 1)).long() - 1


def _tokens(
    rule: str, parents: Tensor, rows: Tensor, probs: Tensor, ids: Tensor, g: Generator
) -> Tensor:
    """[B, N]: tokens drawn as the rule demands, or likely ones without a rule.

    rows: [B, N], the row of each node among probs [B, M, D]. ids: the token of each column.
    """
    tokens = torch.zeros_like(parents)
    for b, of_sequence in enumerate(parents.tolist()):
        siblings: dict[int, list[int]] = {}
        for node, parent in enumerate(of_sequence):
            siblings.setdefault(parent, []).append(node)
        for nodes in siblings.values():
            for k, node in enumerate(nodes):
                row = int(rows[b, node])
                weights = probs[b, row].double()
                of_row = ids if ids.dim() == 1 else ids[b, row]
                drawn = [int(tokens[b, other]) for other in nodes[:k]]
                last = k == len(nodes) - 1
                tokens[b, node] = of_row[_column(rule, weights, of_row, drawn, last, g)]
    return tokens


def _column(
    rule: str, weights: Tensor, ids: Tensor, drawn: list[int], last: bool, g: Generator
) -> Tensor:
    """The column of the next sibling's token, after some siblings were drawn."""
    if rule in ("multi_draft_wor", "top_k_plus_one", ""):
        taken = torch.isin(ids, torch.tensor(drawn, dtype=ids.dtype))
        rest = weights.masked_fill(taken, 0.0)
        weights = rest if float(rest.sum()) > 0 else weights
    if rule == "top_k_plus_one" and not last:
        return weights.argmax()
    if rule == "" and float(torch.rand((), generator=g)) < 0.6:
        return weights.argmax()
    return torch.multinomial(weights, 1, generator=g)[0]


CASES: tuple[Case, ...] = (
    tree_case(3, 7, 517, rule="greedy", draft="none"),
    tree_case(4, 9, 131, bf16, rule="greedy", layout="ragged", id_dtype=i32, limits=True),
    tree_case(3, 7, 131, rule="match", draft="none"),
    tree_case(5, 6, 131, bf16, rule="match", draft="none", filters="tensor", layout="sliced"),
    tree_case(2, 2, 67, rule="match", draft="none", kind="probs", parent_dtype=i32),
    tree_case(5, 9, 517, rule="target_only", draft="none"),
    tree_case(4, 7, 517, bf16, rule="target_only", draft="none", filters="scalar", layout="ragged"),
    tree_case(3, 5, 67, f16, rule="target_only", kind="probs", draft="none", limits=True),
    tree_case(5, 9, 517), tree_case(3, 7, 517, bf16, rows="shared", id_dtype=i32),
    tree_case(4, 9, 517, f16, rows="flat", filters="tensor", layout="ragged", parent_dtype=i32),
    tree_case(3, 9, 517, draft="none", filters="scalar", layout="sliced"),
    tree_case(3, 9, 131, kind="probs", rows="shared", layout="sliced"),
    tree_case(3, 7, 131, kind="probs", draft="none"),
    tree_case(4, 9, 517, draft="sampled", rows="shared", filters="tensor"),
    tree_case(4, 9, 131, bf16, draft="sparse", rows="flat", id_dtype=i32, limits=True),
    tree_case(3, 7, 131, draft="mapped", rows="shared", filters="topk"),
    tree_case(3, 7, 131, draft="wide", filters="warm"),
    tree_case(4, 5, 67, draft="narrow-sampled", rows="flat", bare=True),
    tree_case(3, 9, 23, rows="shared", acceptance=0.3),  # many siblings of one token
    tree_case(3, 4, 131, chain=True), tree_case(2, 4, 67, filters="zero"),
    tree_case(5, 9, 517, rule="multi_draft_wor", rows="shared"),
    tree_case(4, 9, 131, bf16, rule="multi_draft_wor", rows="flat", filters="scalar"),
    tree_case(3, 9, 131, rule="multi_draft_wor", kind="probs", rows="shared", layout="sliced"),
    tree_case(3, 7, 131, rule="multi_draft_wor", draft="sparse", rows="shared", layout="ragged"),
    tree_case(3, 7, 67, rule="multi_draft_wor", draft="mapped-sampled", rows="shared", limits=True),
    tree_case(3, 6, 67, rule="multi_draft_wor", draft="none", filters="tensor", id_dtype=i32),
    tree_case(4, 9, 517, rule="top_k_plus_one", rows="shared"),
    tree_case(4, 7, 131, bf16, rule="top_k_plus_one", rows="flat", filters="tensor"),
    tree_case(3, 7, 131, rule="top_k_plus_one", kind="probs", draft="wide", rows="shared"),
    tree_case(3, 5, 67, rule="top_k_plus_one", draft="sampled", rows="shared", limits=True),
    tree_case(4, 9, 517, rule="k_seq", rows="shared"),
    tree_case(4, 9, 131, bf16, rule="k_seq", rows="flat", filters="tensor", layout="ragged"),
    tree_case(3, 7, 131, rule="k_seq", kind="probs", rows="shared", layout="sliced"),
    tree_case(3, 6, 67, rule="k_seq", draft="sparse", rows="shared", parent_dtype=i32),
    tree_case(3, 6, 67, f16, rule="k_seq", draft="mapped-sampled", rows="shared", limits=True),
    tree_case(5, 9, 517, rule="traversal", rows="shared"),
    tree_case(4, 7, 131, bf16, rule="traversal", filters="tensor", layout="ragged"),
    tree_case(3, 9, 131, rule="traversal", kind="probs", rows="flat", layout="sliced"),
    tree_case(3, 7, 131, rule="traversal", draft="sparse", rows="shared", id_dtype=i32),
    tree_case(3, 6, 67, rule="traversal", draft="none", filters="scalar"),
    tree_case(3, 6, 67, rule="traversal", draft="mapped-sampled", limits=True),
    tree_case(3, 5, 67, f16, rule="traversal", draft="wide", rows="shared", chain=True),
    tree_case(5, 9, 517, rule="typical", draft="none"),
    tree_case(4, 7, 131, bf16, rule="typical", kind="probs", draft="none", layout="ragged"),
    tree_case(3, 5, 67, rule="typical", draft="none", filters="scalar", limits=True),
    *(tree_case(0, 5, 17, rule=r, rows="shared") for r in ("multi_draft", "traversal")),
    *(tree_case(3, 0, 131, rule=r, rows="shared") for r in ("k_seq", "traversal", "target_only")),
    *(tree_case(3, 4, 1, rule=r, rows="shared") for r in ("multi_draft", "multi_draft_wor")),
    *(tree_case(3, 4, 1, rule=r, rows="shared") for r in ("top_k_plus_one", "k_seq", "traversal")),
    tree_case(3, 3, 1, rule="match", draft="none"), tree_case(2, 4, 4097, bf16, rows="shared"),
    tree_case(2, 4, 4097, rule="traversal", filters="scalar"),
    tree_case(2, 3, 4097, bf16, rule="k_seq", draft="wide", rows="shared"),
    tree_case(1, 5, 131073, bf16, rows="shared"),
    tree_case(1, 4, 131073, rule="traversal", rows="shared"),
    tree_case(1, 4, 131073, bf16, rule="k_seq", rows="shared", filters="topp"),
    tree_case(1, 4, 131073, rule="multi_draft_wor", rows="shared", filters="topk"),
    tree_case(4, 9, 517, mask=True, rows="shared", draft="sampled"),
    tree_case(4, 7, 131, bf16, mask=True, filters="tensor", layout="ragged"),
    tree_case(4, 7, 131, mask=True, rule="multi_draft_wor", rows="flat", draft="sampled"),
    tree_case(4, 7, 131, mask=True, rule="top_k_plus_one", rows="shared", draft="wide-sampled"),
    tree_case(4, 7, 131, mask=True, rule="k_seq", rows="shared", draft="sampled", layout="sliced"),
    tree_case(4, 7, 131, mask=True, rule="traversal", rows="shared", draft="sampled"),
    tree_case(4, 7, 131, mask=True, rule="traversal", kind="probs", draft="sparse"),
    tree_case(4, 7, 131, mask=True, rule="greedy", draft="none", kind="probs"),
    tree_case(4, 7, 131, mask=True, rule="match", draft="none", filters="topk"),
    tree_case(4, 7, 67, f16, mask=True, rule="typical", draft="none"),
    tree_case(4, 7, 67, mask=True, rule="target_only", draft="none", layout="ragged"),
)  # fmt: skip
