"""Cases of `verify_tree`: random trees whose nodes were drawn from the law of each draft form."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from specdec_kernels.arguments.rules import TREE_RULES_READING_DRAFT
from specdec_kernels.testing.case import (
    SHORT,
    Args,
    Case,
    any_positions,
    any_seeds,
    endings,
    noisy_draft,
    ragged,
    sampling,
    sliced,
    spaced,
    verify_id,
    zipf_logits,
)
from specdec_kernels.testing.chain import Draft, make_draft, slice_draft, temperatures_of


def tree_case(
    b: int,
    n: int,
    v: int,
    dtype: torch.dtype = torch.float32,
    rule: str = "multi_draft",
    *,
    kind: str = "logits",
    draft: str = "full",
    laws: str = "each",
    filters: str = "off",
    layout: str = "dense",
    chain: bool = False,
    id_dtype: torch.dtype = torch.int64,
    parent_dtype: torch.dtype = torch.int64,
    acceptance: float = 0.7,
    limits: bool = False,
    bare: bool = False,
) -> Case:
    """A case of `verify_tree` with n nodes, some of them absent, some siblings of one token.

    draft: as in `chain_case`.
    laws: "each" node has its own row, "shared" (by `draft_rows`, siblings have one) or "flat" (the
        same with the rows of all sequences in one list).
    layout: "dense", "sliced" (views into wider tensors) or "ragged".
    limits: some sequences end by an end-of-sequence token, at `max_new_tokens` or at `max_depth`.
    """

    def build(g: Generator) -> Args:
        target = zipf_logits(b * (n + 1), v, g).view(b, n + 1, v)
        parents = _parents(b, n, chain, g)
        rows = parents + 1 if laws == "each" else torch.arange(n + 1).expand(b, n + 1)
        above = target.gather(1, rows[..., None].expand(-1, -1, v))
        near = noisy_draft(above.reshape(-1, v), acceptance, g).view(above.shape)
        target = target.to(dtype)
        shaping = sampling(filters, b, v, g)
        made = Draft(torch.empty(0))
        if draft != "none":
            made = make_draft(draft, near.to(dtype), kind, temperatures_of(shaping, b), g)
        laws_of = torch.arange(n).expand(b, n) if laws == "each" else parents + 1
        drawn = rule in TREE_RULES_READING_DRAFT and draft != "none"
        law, names = target.float().softmax(-1), torch.arange(v)
        if drawn and made.law is not None and made.names is not None:
            law, names = made.law, made.names
        of = laws_of if drawn else parents + 1
        tokens = _tokens(rule if drawn else "", parents, of, law, names, g)
        if b >= 3:
            tokens[2, n // 2 :: 3] = -1
        made.tokens = tokens.to(id_dtype)
        if made.ids is not None:
            made.ids = made.ids.to(id_dtype)
        if kind == "probs":
            target = target.float().softmax(-1).to(dtype)
        draft_rows = None if laws == "each" else laws_of.to(torch.int32)
        if laws == "flat":
            draft_rows = _flatten(made, laws_of)
        parents = parents.to(parent_dtype)
        at = [any_seeds(b, g), any_positions(b, g)]
        target_indptr = None
        if layout == "ragged":
            used, target_indptr = ragged(b, n, g)
            target = target[used]
        if layout == "sliced":
            target, parents = sliced(target), sliced(parents)
            draft_rows = None if draft_rows is None else sliced(draft_rows)
            slice_draft(made)
            at = [spaced(x) for x in at]
        ends = endings(made.tokens, 4, g) if limits else (None, None)
        return (
            *(target, made.tokens, parents, made.rows, made.ids, made.columns),
            *(made.logsumexp, made.threshold, made.temperatures, 1.0, draft_rows, kind, rule),
            *(*shaping, *at, target_indptr, None, 0.09, 0.3, *ends),
            *(min(n, 2) if limits else n, not bare, not bare),
        )

    words = verify_id(
        [f"B{b}", f"N{n}", f"V{v}", SHORT[dtype], rule], [kind, draft, laws, filters, layout],
        chain=chain, i32=id_dtype == torch.int32, p32=parent_dtype == torch.int32, limits=limits,
        bare=bare,
    )  # fmt: skip
    return Case("verify_tree", words, build, b * (n + 1), v)


def _parents(b: int, n: int, chain: bool, g: Generator) -> Tensor:
    """[B, N]: each node hangs below one before it, more likely a late one, or below the root."""
    if chain:
        return torch.arange(-1, n - 1).expand(b, n).clone()
    two = torch.rand(b, n, 2, generator=g).sort(-1).values
    late = torch.rand(b, n, generator=g) < 0.5
    u = torch.where(late, two[..., 1], two[..., 0])
    return (u * torch.arange(1, n + 1)).long() - 1


def _tokens(
    rule: str, parents: Tensor, laws: Tensor, law: Tensor, names: Tensor, g: Generator
) -> Tensor:
    """[B, N]: drawn from law [B, M, D], or likely under it where the rule asks for no draws."""
    tokens = torch.zeros_like(parents)
    for b, of_sequence in enumerate(parents.tolist()):
        siblings: dict[int, list[int]] = {}
        for node, parent in enumerate(of_sequence):
            siblings.setdefault(parent, []).append(node)
        for nodes in siblings.values():
            for k, node in enumerate(nodes):
                row = int(laws[b, node])
                weights = law[b, row].double()
                at = names if names.dim() == 1 else names[b, row]
                drawn = [int(tokens[b, other]) for other in nodes[:k]]
                tokens[b, node] = at[_column(rule, weights, at, drawn, k == len(nodes) - 1, g)]
    return tokens


def _column(
    rule: str, weights: Tensor, names: Tensor, drawn: list[int], last: bool, g: Generator
) -> Tensor:
    """Where a sibling's token stands among the columns of its law, those before it drawn."""
    if rule in ("multi_draft_wor", "top_k_plus_one", ""):
        tried = torch.isin(names, torch.tensor(drawn, dtype=names.dtype))
        off = weights.masked_fill(tried, 0.0)
        weights = off if float(off.sum()) > 0 else weights
    if rule == "top_k_plus_one" and not last:
        return weights.argmax()
    if rule == "" and float(torch.rand((), generator=g)) < 0.6:
        return weights.argmax()
    return torch.multinomial(weights, 1, generator=g)[0]


def _flatten(made: Draft, laws: Tensor) -> Tensor:
    """One list of rows for all sequences; returns `draft_rows`."""
    b, m = laws.shape[0], laws.shape[1] + 1
    for name in ("rows", "ids", "logsumexp", "threshold"):
        x = getattr(made, name)
        setattr(made, name, None if x is None else x.flatten(0, 1))
    return (laws + m * torch.arange(b)[:, None]).to(torch.int32)
