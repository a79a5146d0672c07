"""Cases of `verify_chain`: every form of the draft, with tokens drawn from its distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
from specdec_kernels.arguments.rules import KINDS, RULES, RULES_READING_DRAFT
from specdec_kernels.reference import Distribution

bf16, f16 = torch.bfloat16, torch.float16


@dataclass
class DraftInputs:
    """The draft of one case: the arguments of the op, and what its tokens are drawn from."""

    tokens: Tensor  # [B, gamma]
    rows: Tensor | None = None  # [B, gamma, D]
    ids: Tensor | None = None
    columns: Tensor | None = None
    logsumexp: Tensor | None = None
    threshold: Tensor | None = None
    temperatures: Tensor | None = None
    bitmask: Tensor | None = None
    probs: Tensor | None = None  # [B, gamma, D], by column
    column_ids: Tensor | None = None  # the token of each column: [D] or [B, gamma, D]
    of_rows: ClassVar[tuple[str, ...]] = ("rows", "ids", "logsumexp", "threshold", "bitmask")

    def flatten(self, rows: Tensor, m: int) -> Tensor:
        """Puts the rows [B, M, D] of all sequences into one list; returns `draft_rows`."""
        for name in self.of_rows:
            x = getattr(self, name)
            setattr(self, name, None if x is None else x.flatten(0, 1))
        return (rows + m * torch.arange(len(rows))[:, None]).to(torch.int32)

    def scatter(self, places: Tensor) -> None:
        """Moves row i of sequence b to row places[b, i]."""
        origin, every = places.argsort(-1), torch.arange(len(places))[:, None]
        for name in self.of_rows:
            x = getattr(self, name)
            setattr(self, name, None if x is None else x[every, origin])


def chain_case(
    b,
    gamma,
    v,
    dtype=torch.float32,
    rule="token",
    *,
    kind="logits",
    draft="full",
    rows="each",
    filters="off",
    layout="dense",
    id_dtype=torch.int64,
    acceptance=0.8,
    limits=False,
    mask=False,
    bare=False,
) -> Case:
    """A case of `verify_chain`.

    draft: "full" (a tensor), "none" (one-hot), "sampled" (filtered, with its logsumexp and
        threshold, at temperatures of its own), "sparse" (the most likely ids, one of them twice,
        some places unused), "mapped" (over part of the vocabulary, in an order of its own), "wide"
        and "narrow" (more or fewer columns than the target's). The last three also exist with
        "-sampled".
    rows: of the draft: "each" (row i is that of draft i), "chosen" (in another order, by
        `draft_rows`) or "flat" (the same, with the rows of all sequences in one list).
    layout: "dense", "sliced" (views into wider tensors), "ragged", or "ragged-padded" (only the
        target is ragged, the draft is [B, gamma, D]).
    limits: some sequences end by an end-of-sequence token or at `max_new_tokens`.
    mask: a bitmask of tokens, and of those that a sampled draft may draw; other entries are NaN.
    bare: without the optional outputs.
    """

    def build(g: Generator) -> Args:
        target = zipf_logits(b * (gamma + 1), v, g).view(b, gamma + 1, v)
        near = noisy_draft(target[:, :gamma].reshape(-1, v), acceptance, g).view(b, gamma, v)
        target = target.to(dtype)
        params = sampling(filters, b, v, g)
        if draft == "none":
            made = DraftInputs(_likely(target, acceptance, g))
        else:
            made = make_draft(draft, near.to(dtype), kind, temperatures_of(params, b), g, mask)
            if rule not in RULES_READING_DRAFT:
                made.tokens = _likely(target, acceptance, g)
        if b >= 3 and gamma >= 2:
            made.tokens[2, gamma // 2 :] = -1
        made.tokens = made.tokens.to(id_dtype)
        if made.ids is not None:
            made.ids = made.ids.to(id_dtype)
        if kind == "probs":
            target = target.float().softmax(-1).to(dtype)
        noise = [any_seeds(b, g), any_positions(b, g)]
        bitmask = None
        if mask:
            allowed = some_allowed(target.shape, made.tokens, g)
            target, bitmask = target.where(allowed, torch.nan), packed_bits(allowed)
        target_indptr = draft_rows = None
        if rows != "each":
            draft_rows = torch.rand(b, gamma, generator=g).argsort(-1)
            made.scatter(draft_rows)
            draft_rows = made.flatten(draft_rows, gamma) if rows == "flat" else draft_rows
        if layout.startswith("ragged"):
            used, target_indptr = ragged(b, gamma, g)
            target, bitmask = target[used], None if bitmask is None else bitmask[used]
            if layout == "ragged" and made.rows is not None and rows == "each":
                made.rows = made.rows[used[:, 1:]]
                for name in ("ids", "bitmask"):
                    x = getattr(made, name)
                    setattr(made, name, None if x is None else x[used[:, 1:]])
        if layout == "sliced":
            target, bitmask = sliced(target), None if bitmask is None else sliced(bitmask)
            slice_draft(made)
            draft_rows = None if draft_rows is None else sliced(draft_rows)
            noise = [spaced(x) for x in noise]
        rates = torch.rand(gamma, generator=g) if rule == "synthetic" else None
        lenience = 0.6 if rule == "lenient" else 1.0
        top = (3, 1.5) if rule == "top_beta" else (1, 0.0)
        ends = ending_limits(made.tokens, gamma + 2, g) if limits else (None, None)
        return (
            *(target, made.tokens, made.rows, made.ids, made.columns),
            *(made.logsumexp, made.threshold, made.temperatures, 1.0, made.bitmask),
            *(draft_rows, KINDS.index(kind), RULES.index(rule), *params, bitmask, *noise),
            *(target_indptr, None, lenience, 0.09, 0.3, *top, rates, *ends, not bare, not bare),
        )

    sizes = [f"B{b}", f"g{gamma}", f"V{v}", SHORT[dtype], rule]
    i32 = id_dtype == torch.int32
    words = verify_id(
        sizes, [kind, draft, rows, filters, layout], i32=i32, limits=limits, mask=mask, bare=bare
    )
    return Case("verify_chain", words, build, b * (gamma + 1), v)


def temperatures_of(params: Args, b: int) -> Tensor:
    """[B], of the eight sampling arguments."""
    given, scalar = params[:2]
    return torch.full((b,), scalar) if given is None else given


def _likely(target: Tensor, acceptance: float, g: Generator) -> Tensor:
    """[B, gamma]: the argmax of each target row, replaced by a random token in some places."""
    rows = target[:, :-1].float()
    wrong = torch.rand(rows.shape[:2], generator=g) > acceptance
    other = torch.randint(0, rows.shape[-1], rows.shape[:2], generator=g)
    return torch.where(wrong, other, rows.argmax(-1))


def make_draft(
    form: str, near: Tensor, kind: str, temperatures: Tensor, g: Generator, mask: bool = False
) -> DraftInputs:
    """The draft of a case.

    form: as `draft` of `chain_case`. near: [B, gamma, V] logits near the target's, in the dtype of
    the rows. mask: a sampled draft has a bitmask.
    """
    form, _, suffix = form.partition("-")
    if form == "sparse":
        return _sparse_draft(near, temperatures, g)
    ids = torch.arange(near.shape[-1])
    columns = None
    rows = near
    if form == "mapped":
        ids = torch.randperm(len(ids), generator=g)[: max(1, 2 * len(ids) // 3)]
        columns = torch.full((near.shape[-1],), -1, dtype=torch.int32)
        columns[ids] = torch.arange(len(ids), dtype=torch.int32)
        rows = near[..., ids]
    elif form == "narrow":
        rows = near[..., : max(1, len(ids) - len(ids) // 8)].contiguous()
    elif form == "wide":
        rows = _widen(near, len(ids) // 8 + 1, g)
        ids = torch.arange(rows.shape[-1])
    made = DraftInputs(torch.empty(0), rows, columns=columns)
    if "sampled" in (form, suffix):
        if mask:
            none = torch.empty(*rows.shape[:-2], 0, dtype=torch.int64)
            allowed = some_allowed(rows.shape, none, g)
            allowed[..., 0] = True
            made.bitmask, rows = packed_bits(allowed), rows.where(allowed, -torch.inf)
            made.rows = rows.where(allowed, torch.nan)
        probs = _add_statistics(made, rows, g)
    elif kind == "probs":
        made.rows = rows.float().softmax(-1).to(rows.dtype)
        probs = made.rows
    else:
        probs = _softmax(rows, temperatures)
    made.probs, made.column_ids = probs, ids[: probs.shape[-1]]
    made.tokens = ids[_draw(probs, g)]
    return made


def _softmax(rows: Tensor, temperatures: Tensor) -> Tensor:
    t = temperatures.clamp(min=1e-4)  # as good as 0: the largest entry gets all mass
    return (rows.double() / t[:, None, None]).softmax(-1)


def _draw(probs: Tensor, g: Generator) -> Tensor:
    """[B, gamma] columns, drawn from [B, gamma, D]."""
    flat = probs.flatten(0, 1).float()
    if len(flat) == 0:
        return torch.zeros(probs.shape[:2], dtype=torch.int64)
    return torch.multinomial(flat, 1, generator=g).view(probs.shape[:2])


def _widen(near: Tensor, extra: int, g: Generator) -> Tensor:
    """Adds columns that the target does not have; together they hold a seventh of the mass."""
    b, gamma, _ = near.shape
    level = near.double().logsumexp(-1, keepdim=True) - 1.8
    noise = torch.randn(b, gamma, extra, generator=g).double()
    more = level + noise.log_softmax(-1) if extra else noise
    return torch.cat([near, more.to(near.dtype)], -1)


def _add_statistics(made: DraftInputs, rows: Tensor, g: Generator) -> Tensor:
    """Adds what `sample` returns for filtered rows; returns their distributions [B, gamma, D]."""
    b, gamma, d = rows.shape
    made.temperatures = 0.5 + torch.rand(b, generator=g)
    filtered = [
        Distribution(row.double(), float(made.temperatures[i]), max(1, d // 4), 0.95, 0.0)
        for i in range(b)
        for row in rows[i]
    ]
    made.logsumexp = torch.tensor([x.logsumexp for x in filtered], dtype=torch.float64).view(
        b, gamma
    )
    made.threshold = torch.tensor([x.threshold for x in filtered]).view(b, gamma)
    return torch.stack([x.probs for x in filtered] or [torch.empty(0, d)]).view(b, gamma, d)


def _sparse_draft(near: Tensor, temperatures: Tensor, g: Generator) -> DraftInputs:
    top = _softmax(near, temperatures).topk(min(near.shape[-1], 8), -1)
    probs = top.values / top.values.sum(-1, keepdim=True)
    # The likeliest id occurs twice with half its probability, and two places are unused.
    half = probs[..., :1] / 2
    unused = torch.zeros_like(half)
    probs = torch.cat([half, probs[..., 1:], half, unused, unused], -1)
    none = torch.full_like(top.indices[..., :1], -1)
    ids = torch.cat([top.indices, top.indices[..., :1], none, none - 6], -1)
    order = torch.rand(probs.shape, generator=g).argsort(-1)
    probs, ids = probs.gather(-1, order).to(near.dtype), ids.gather(-1, order)
    tokens = ids.gather(-1, _draw(probs, g)[..., None])[..., 0]
    return DraftInputs(tokens, probs, ids, probs=probs, column_ids=ids)


def slice_draft(made: DraftInputs) -> None:
    """Turns the draft's tensors into views of wider ones."""
    made.tokens = sliced(made.tokens)
    made.rows = None if made.rows is None else sliced(made.rows)
    made.ids = None if made.ids is None else sliced(made.ids)
    made.bitmask = None if made.bitmask is None else sliced(made.bitmask)
    made.columns = None if made.columns is None else spaced(made.columns)


CASES: tuple[Case, ...] = (
    chain_case(3, 5, 1031), chain_case(3, 5, 1031, bf16),
    chain_case(3, 5, 1031, f16, layout="sliced"), chain_case(4, 3, 517, kind="probs"),
    chain_case(4, 3, 517, bf16, kind="probs", layout="ragged"),
    chain_case(4, 3, 517, kind="probs", filters="scalar"),
    chain_case(4, 3, 517, kind="probs", draft="none"),
    chain_case(5, 4, 517, draft="none", id_dtype=torch.int32),
    chain_case(5, 4, 517, draft="none", filters="tensor", layout="ragged"),
    chain_case(4, 3, 517, draft="sampled"),
    chain_case(4, 3, 517, bf16, draft="sampled", filters="scalar"),
    chain_case(5, 3, 517, draft="sampled", filters="tensor", layout="ragged"),
    chain_case(5, 3, 517, f16, draft="sampled", layout="ragged-padded"),
    chain_case(4, 3, 517, bf16, rows="flat", layout="ragged"),
    chain_case(3, 3, 131, rule="block", draft="sampled", rows="flat", id_dtype=torch.int32),
    chain_case(3, 3, 131, kind="probs", draft="sparse", rows="chosen", layout="sliced"),
    chain_case(5, 4, 517, layout="ragged", id_dtype=torch.int32),
    chain_case(7, 4, 517, filters="tensor"), chain_case(3, 4, 517, filters="warm"),
    chain_case(3, 4, 517, filters="zero"), chain_case(4, 4, 517, rule="greedy"),
    chain_case(4, 4, 517, bf16, rule="greedy", draft="none", layout="ragged"),
    chain_case(3, 4, 517, kind="probs", rule="greedy", id_dtype=torch.int32),
    chain_case(3, 4, 131, rule="match", draft="none"),
    chain_case(5, 3, 131, bf16, rule="match", draft="none", filters="tensor"),
    chain_case(4, 3, 131, rule="match", layout="ragged"),
    chain_case(3, 2, 131, kind="probs", rule="match", draft="none"), chain_case(0, 4, 17),
    chain_case(3, 0, 517), chain_case(3, 0, 517, draft="none", filters="scalar", layout="ragged"),
    chain_case(4, 3, 1), chain_case(4, 3, 1, rule="match", draft="none"),
    chain_case(2, 2, 4097, bf16, filters="scalar"), chain_case(2, 2, 67),
    chain_case(1, 2, 67, f16, draft="sampled", filters="scalar"),
    chain_case(1, 2, 67, kind="probs", filters="topp"),
    chain_case(2, 2, 67, bf16, kind="probs", layout="sliced", id_dtype=torch.int32),
    chain_case(2, 1, 67, draft="none", filters="tensor", layout="ragged"),
    chain_case(2, 2, 67, rule="greedy", draft="none", layout="ragged-padded"),
    chain_case(2, 2, 67, rule="match", draft="none", filters="warm"),
    chain_case(1, 1, 4097, draft="none", filters="topk"), chain_case(1, 3, 131073, bf16),
    chain_case(2, 4, 151936, filters="scalar", acceptance=0.7), chain_case(1, 3, 67, rule="block"),
    chain_case(2, 2, 67, bf16, rule="block"),
    chain_case(1, 4, 67, rule="block", kind="probs", id_dtype=torch.int32),
    chain_case(2, 2, 67, f16, rule="block", draft="none", filters="tensor"),
    chain_case(1, 3, 131, rule="block", draft="sampled", filters="scalar", layout="ragged"),
    chain_case(2, 2, 67, rule="block", draft="sparse", id_dtype=torch.int32),
    chain_case(2, 2, 67, rule="block", draft="mapped", layout="ragged"),
    chain_case(1, 3, 67, rule="block", draft="wide", limits=True),
    chain_case(2, 2, 67, rule="block", draft="narrow-sampled", limits=True),
    chain_case(1, 2, 4097, bf16, rule="block"), chain_case(1, 3, 1, rule="block"),
    chain_case(2, 2, 67, draft="sparse", filters="scalar"),
    chain_case(2, 2, 67, bf16, draft="mapped-sampled"),
    chain_case(2, 2, 67, kind="probs", draft="wide"),
    chain_case(2, 1, 67, f16, draft="narrow", layout="ragged-padded"),
    chain_case(2, 2, 67, limits=True, bare=True),
    chain_case(2, 2, 67, rule="typical", filters="tensor"),
    chain_case(2, 2, 67, rule="top_beta", filters="tensor"),
    chain_case(2, 2, 67, bf16, rule="top_beta", kind="probs", filters="zero"),
    chain_case(1, 2, 67, rule="lenient", limits=True),
    chain_case(2, 2, 67, bf16, rule="lenient", filters="zero"),
    chain_case(2, 2, 67, rule="synthetic", draft="none", limits=True, id_dtype=torch.int32),
    chain_case(2, 2, 67, rule="synthetic", filters="zero"), chain_case(7, 4, 517, rule="block"),
    chain_case(5, 4, 517, bf16, rule="block", kind="probs", layout="sliced"),
    chain_case(
        5, 4, 517, rule="block", draft="sparse", filters="scalar", layout="sliced", limits=True
    ),
    chain_case(5, 4, 517, bf16, rule="block", draft="mapped-sampled", filters="tensor"),
    chain_case(4, 5, 517, f16, rule="block", draft="wide-sampled", layout="ragged-padded"),
    chain_case(5, 3, 517, bf16, draft="sparse", filters="tensor", layout="ragged"),
    chain_case(4, 3, 517, kind="probs", draft="mapped", layout="sliced"),
    chain_case(2, 2, 67, bf16, rule="typical", kind="probs", layout="ragged", limits=True),
    chain_case(7, 4, 517, rule="top_beta", draft="none", layout="ragged", limits=True),
    chain_case(5, 3, 131, rule="match", draft="none", layout="ragged", limits=True),
    chain_case(5, 4, 517, kind="probs", rule="greedy", limits=True),
    chain_case(0, 4, 17, rule="block", draft="sparse"),
    chain_case(3, 0, 517, rule="block", draft="mapped"),
    chain_case(3, 2, 1, rule="block", draft="sparse"), chain_case(1, 3, 131073, bf16, rule="block"),
    chain_case(2, 4, 151936, rule="block", draft="sparse", filters="scalar", limits=True),
    chain_case(4, 3, 517, mask=True), chain_case(4, 3, 517, bf16, mask=True, layout="ragged"),
    chain_case(4, 3, 1031, f16, mask=True, filters="tensor", layout="sliced", draft="none"),
    chain_case(4, 3, 517, kind="probs", mask=True, draft="sparse"),
    chain_case(3, 3, 517, kind="probs", mask=True, rule="greedy"),
    chain_case(4, 3, 517, mask=True, draft="sampled", filters="scalar", layout="sliced"),
    chain_case(4, 3, 517, mask=True, rule="block", draft="sampled"),
    chain_case(4, 3, 517, bf16, mask=True, rule="block", draft="wide-sampled", layout="ragged"),
    chain_case(4, 3, 517, mask=True, rule="block", draft="mapped-sampled", rows="flat"),
    chain_case(4, 3, 131, mask=True, rule="match", draft="none", filters="tensor"),
    chain_case(4, 3, 131, mask=True, rule="typical"),
    chain_case(4, 3, 67, mask=True, rule="top_beta"),
    chain_case(4, 3, 67, mask=True, rule="lenient", filters="zero", kind="probs"),
    chain_case(2, 2, 517, mask=True),
    chain_case(1, 3, 67, mask=True, rule="lenient", layout="ragged"),
    chain_case(1, 4, 517, bf16, mask=True, rule="block", draft="mapped-sampled", filters="topk"),
    chain_case(2, 2, 131, kind="probs", mask=True, rule="match", draft="none", filters="tensor"),
    chain_case(2, 2, 67, kind="probs", mask=True, rule="greedy", limits=True),
    chain_case(3, 2, 1, mask=True), chain_case(2, 2, 8193, bf16, mask=True, filters="scalar"),
)  # fmt: skip
