"""Cases of `verify_chain`: every form of the draft, with tokens drawn from its law."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from specdec_kernels.arguments.chain import RULES_READING_DRAFT
from specdec_kernels.reference import Distribution
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


@dataclass
class Draft:
    """The draft of one case: what `verify_chain` gets of it, and tokens drawn from its law."""

    tokens: Tensor  # [B, gamma]
    rows: Tensor | None = None  # [B, gamma, D]
    ids: Tensor | None = None
    columns: Tensor | None = None
    logsumexp: Tensor | None = None
    threshold: Tensor | None = None
    temperatures: Tensor | None = None
    law: Tensor | None = None  # [B, gamma, D] what tokens are drawn from, by columns
    names: Tensor | None = None  # the token of each column: [D] or [B, gamma, D]


def chain_case(
    b: int,
    gamma: int,
    v: int,
    dtype: torch.dtype = torch.float32,
    rule: str = "token",
    *,
    kind: str = "logits",
    draft: str = "full",
    filters: str = "off",
    layout: str = "dense",
    id_dtype: torch.dtype = torch.int64,
    acceptance: float = 0.8,
    limits: bool = False,
    bare: bool = False,
) -> Case:
    """A case of `verify_chain`.

    draft: "full" (a tensor), "none" (point mass), "sampled" (filtered, with its logsumexp and
        threshold, at temperatures of its own), "sparse" (the most likely ids, one of them twice,
        some slots unused), "mapped" (over part of the vocabulary, in an order of its own), "wide"
        and "narrow" (more or fewer columns than the target's); the last three also "-sampled".
    layout: "dense", "sliced" (views into wider tensors) or "ragged" (with "ragged-padded", the
        draft stays [B, gamma, D]).
    limits: some sequences end by an end-of-sequence token or at `max_new_tokens`.
    bare: without the optional outputs.
    """

    def build(g: Generator) -> Args:
        target = zipf_logits(b * (gamma + 1), v, g).view(b, gamma + 1, v)
        near = noisy_draft(target[:, :gamma].reshape(-1, v), acceptance, g).view(b, gamma, v)
        target = target.to(dtype)
        shaping = sampling(filters, b, v, g)
        if draft == "none":
            made = Draft(_likely(target, acceptance, g))
        else:
            made = make_draft(draft, near.to(dtype), kind, temperatures_of(shaping, b), g)
            if rule not in RULES_READING_DRAFT:
                made.tokens = _likely(target, acceptance, g)
        if b >= 3 and gamma >= 2:
            made.tokens[2, gamma // 2 :] = -1
        made.tokens = made.tokens.to(id_dtype)
        if made.ids is not None:
            made.ids = made.ids.to(id_dtype)
        if kind == "probs":
            target = target.float().softmax(-1).to(dtype)
        at = [any_seeds(b, g), any_positions(b, g)]
        target_indptr = None
        if layout.startswith("ragged"):
            used, target_indptr = ragged(b, gamma, g)
            target = target[used]
            if layout == "ragged" and made.rows is not None:
                made.rows = made.rows[used[:, 1:]]
                made.ids = None if made.ids is None else made.ids[used[:, 1:]]
        if layout == "sliced":
            target = sliced(target)
            slice_draft(made)
            at = [spaced(x) for x in at]
        rates = torch.rand(gamma, generator=g) if rule == "synthetic" else None
        lenience = 0.6 if rule == "lenient" else 1.0
        ends = endings(made.tokens, gamma + 2, g) if limits else (None, None)
        return (
            *(target, made.tokens, made.rows, made.ids, made.columns),
            *(made.logsumexp, made.threshold, made.temperatures, 1.0, kind, rule, *shaping, *at),
            *(target_indptr, None, lenience, 0.09, 0.3, rates, *ends, not bare, not bare),
        )

    sizes = [f"B{b}", f"g{gamma}", f"V{v}", SHORT[dtype], rule]
    i32 = id_dtype == torch.int32
    words = verify_id(sizes, [kind, draft, filters, layout], i32=i32, limits=limits, bare=bare)
    return Case("verify_chain", words, build, b * (gamma + 1), v)


def temperatures_of(shaping: Args, b: int) -> Tensor:
    given, scalar = shaping[:2]
    return torch.full((b,), scalar) if given is None else given


def _likely(target: Tensor, acceptance: float, g: Generator) -> Tensor:
    """[B, gamma] argmax of the target, with some tokens wrong."""
    rows = target[:, :-1].float()
    wrong = torch.rand(rows.shape[:2], generator=g) > acceptance
    other = torch.randint(0, rows.shape[-1], rows.shape[:2], generator=g)
    return torch.where(wrong, other, rows.argmax(-1))


def make_draft(form: str, near: Tensor, kind: str, temperatures: Tensor, g: Generator) -> Draft:
    """near: [B, gamma, V] logits near the target's, in the dtype of the rows."""
    form, _, left = form.partition("-")
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
    made = Draft(torch.empty(0), rows, columns=columns)
    if "sampled" in (form, left):
        law = _leave_behind(made, rows, g)
    elif kind == "probs":
        made.rows = rows.float().softmax(-1).to(rows.dtype)
        law = made.rows
    else:
        law = _softmax(rows, temperatures)
    made.law, made.names = law, ids[: law.shape[-1]]
    made.tokens = ids[_draw(law, g)]
    return made


def _softmax(rows: Tensor, temperatures: Tensor) -> Tensor:
    t = temperatures.clamp(min=1e-4)  # so small that the largest entry is all
    return (rows.double() / t[:, None, None]).softmax(-1)


def _draw(law: Tensor, g: Generator) -> Tensor:
    """[B, gamma] columns."""
    flat = law.flatten(0, 1).float()
    if len(flat) == 0:
        return torch.zeros(law.shape[:2], dtype=torch.int64)
    return torch.multinomial(flat, 1, generator=g).view(law.shape[:2])


def _widen(near: Tensor, extra: int, g: Generator) -> Tensor:
    """Columns that the target does not have, with about a seventh of the mass together."""
    b, gamma, _ = near.shape
    level = near.double().logsumexp(-1, keepdim=True) - 1.8
    noise = torch.randn(b, gamma, extra, generator=g).double()
    more = level + noise.log_softmax(-1) if extra else noise
    return torch.cat([near, more.to(near.dtype)], -1)


def _leave_behind(made: Draft, rows: Tensor, g: Generator) -> Tensor:
    """What `sample` leaves behind of filtered rows, and their law [B, gamma, D]."""
    b, gamma, d = rows.shape
    made.temperatures = 0.5 + torch.rand(b, generator=g)
    laws = [
        Distribution(row.double(), float(made.temperatures[i]), max(1, d // 4), 0.95, 0.0)
        for i in range(b)
        for row in rows[i]
    ]
    made.logsumexp = torch.tensor([x.logsumexp for x in laws], dtype=torch.float64).view(b, gamma)
    made.threshold = torch.tensor([x.threshold for x in laws]).view(b, gamma)
    return torch.stack([x.probs for x in laws] or [torch.empty(0, d)]).view(b, gamma, d)


def _sparse_draft(near: Tensor, temperatures: Tensor, g: Generator) -> Draft:
    top = _softmax(near, temperatures).topk(min(near.shape[-1], 8), -1)
    law = top.values / top.values.sum(-1, keepdim=True)
    # The likeliest id comes in two halves, two slots stay unused.
    half = law[..., :1] / 2
    unused = torch.zeros_like(half)
    law = torch.cat([half, law[..., 1:], half, unused, unused], -1)
    none = torch.full_like(top.indices[..., :1], -1)
    ids = torch.cat([top.indices, top.indices[..., :1], none, none - 6], -1)
    order = torch.rand(law.shape, generator=g).argsort(-1)
    law, ids = law.gather(-1, order).to(near.dtype), ids.gather(-1, order)
    tokens = ids.gather(-1, _draw(law, g)[..., None])[..., 0]
    return Draft(tokens, law, ids, law=law, names=ids)


def slice_draft(made: Draft) -> None:
    made.tokens = sliced(made.tokens)
    made.rows = None if made.rows is None else sliced(made.rows)
    made.ids = None if made.ids is None else sliced(made.ids)
    made.columns = None if made.columns is None else spaced(made.columns)
