"""Cases of `sample`, `apply_penalties_` and `kept_tokens`."""

from __future__ import annotations

import torch
from torch import Generator

from proofs.case import (
    SHORT,
    Args,
    Case,
    any_positions,
    any_seeds,
    packed_bits,
    ragged,
    sampling,
    sliced,
    some_allowed,
    spaced,
    zipf_logits,
)
from specdec_kernels.arguments.rules import KINDS, METHODS, NOISES

bf16, f16 = torch.bfloat16, torch.float16


def sample_case(
    r,
    v,
    dtype=torch.float32,
    *,
    filters="off",
    noise="draft",
    method="cdf",
    layout="dense",
    mask=False,
) -> Case:
    """A case of `sample` with r rows of v logits."""

    def build(g: Generator) -> Args:
        logits = zipf_logits(r, v, g).to(dtype)
        seeds, positions = any_seeds(r, g), any_positions(r, g)
        bitmask = None
        if mask:
            allowed = some_allowed((r, 2, v), torch.empty(r, 0, dtype=torch.int64), g)[:, 0]
            logits, bitmask = logits.where(allowed, torch.nan), packed_bits(allowed)
        if layout == "sliced":
            logits, seeds, positions = sliced(logits), spaced(seeds), spaced(positions)
            bitmask = None if bitmask is None else sliced(bitmask)
        return (
            logits,
            *sampling(filters, r, v, g),
            bitmask,
            seeds,
            positions,
            NOISES.index(noise),
            METHODS.index(method),
        )

    words = [f"R{r}", f"V{v}", SHORT[dtype], noise, method]
    words += [w for w in (filters, layout) if w not in ("off", "dense")] + ["mask"] * mask
    return Case("sample", "-".join(words), build, r, v)


CASES: tuple[Case, ...] = (
    sample_case(5, 1031), sample_case(5, 1031, bf16, layout="sliced"),
    sample_case(4, 517, f16, filters="scalar"), sample_case(7, 517, filters="tensor"),
    sample_case(6, 1031, bf16, filters="tensor", noise="residual"),
    sample_case(3, 131, method="gumbel"),
    sample_case(4, 131, bf16, noise="shared", method="gumbel", layout="sliced"),
    sample_case(5, 131, filters="tensor", noise="shared", method="gumbel"),
    sample_case(3, 1031, filters="topk"), sample_case(3, 1031, filters="topp"),
    sample_case(3, 1031, f16, filters="minp"), sample_case(3, 1031, filters="warm"),
    sample_case(3, 1031, filters="zero"), sample_case(0, 17), sample_case(3, 1),
    sample_case(3, 1, filters="scalar", noise="shared", method="gumbel"),
    sample_case(2, 4097, bf16, filters="scalar"), sample_case(1, 131073, bf16),
    sample_case(2, 151936, filters="scalar"), sample_case(5, 1031, mask=True),
    sample_case(5, 1031, bf16, mask=True, filters="tensor", layout="sliced"),
    sample_case(4, 131, f16, mask=True, noise="shared", method="gumbel"),
    sample_case(3, 67, mask=True, filters="zero"), sample_case(2, 131073, bf16, mask=True),
)  # fmt: skip


def penalty_case(
    b, n, v, dtype=torch.float32, *, tree=False, layout="dense", tensors=True, bare=False
) -> Case:
    """A case of `apply_penalties_`: some tokens are drafted, biased, counted and ends at once.

    tree: the drafts are a tree, some of them absent or out of range. layout: "dense", "sliced" or
    "ragged". tensors: penalties differ by sequence, one of them out of range. bare: nothing but
    scalar penalties.
    """

    def build(g: Generator) -> Args:
        target = zipf_logits(b * (n + 1), v, g).view(b, n + 1, v) + 2.0
        target = target.masked_fill(torch.rand(target.shape, generator=g) < 0.1, -torch.inf)
        tokens = torch.randint(-1, v + 1, (b, n), generator=g)
        tokens[:, 1:] = tokens[:, :1].where(
            torch.rand(b, n, generator=g)[:, 1:] < 0.3, tokens[:, 1:]
        )
        parents = (torch.rand(b, n, generator=g) * torch.arange(1, n + 1)).long() - 1
        target_indptr = None
        target = target.to(dtype)
        if layout == "ragged":
            used, target_indptr = ragged(b, n, g)
            target = target[used]
        counts = torch.randint(-3, 4, (b, v), generator=g, dtype=torch.int32)
        counts[:, : v // 2] = 0
        prompt = packed_bits(torch.rand(b, v, generator=g) < 0.2)
        if layout == "sliced":
            target, tokens, parents, counts, prompt = map(
                sliced, (target, tokens, parents, counts, prompt)
            )
        penalties = (None, 1.3, None, 0.4, None, -0.2)
        if tensors:
            each = [0.5 + torch.rand(b, generator=g) for _ in range(3)]
            each[0][1:2], each[2][2:3] = 0.0, torch.inf
            penalties = (each[0], 1.0, each[1] - 1, 0.0, each[2] - 1, 0.0)
        ids = torch.cat([tokens[:, :2], torch.randint(-1, v + 1, (b, 5), generator=g)], 1)
        biases = torch.randn(ids.shape, generator=g)
        biases[:, -1:] = -torch.inf
        ends = torch.randint(0, v, (2,), generator=g)
        least = torch.randint(-1, n + 2, (b,), generator=g)
        some = (ids, biases, least, ends)
        if bare:
            target_indptr = counts = prompt = None
            some = (None,) * 4
        return (
            *(target, tokens, parents if tree else None, target_indptr, counts, prompt),
            *(*penalties, *some),
        )

    words = [f"B{b}", f"N{n}", f"V{v}", SHORT[dtype], "tree" if tree else "chain", layout]
    words += ["tensors"] * tensors + ["bare"] * bare
    return Case("apply_penalties_", "-".join(words), build, b * (n + 1), v)


PENALTY_CASES: tuple[Case, ...] = (
    penalty_case(4, 3, 517), penalty_case(4, 3, 517, bf16, layout="sliced"),
    penalty_case(4, 5, 131, f16, tree=True), penalty_case(5, 4, 67, tree=True, layout="ragged"),
    penalty_case(3, 6, 67, tree=True, layout="sliced", tensors=False),
    penalty_case(3, 0, 131, tensors=False), penalty_case(0, 2, 17), penalty_case(3, 2, 1),
    penalty_case(3, 4, 67, bf16, bare=True, tensors=False), penalty_case(1, 5, 131073, bf16),
)  # fmt: skip


def kept_case(
    b, n, v, dtype=torch.float32, *, k=8, filters="off", kind="logits", layout="dense", mask=False
) -> Case:
    """A case of `kept_tokens` with n rows of each of b sequences, some of which do not exist.

    layout: "plain" (rows without sequences), "dense" (every row), "sliced" and "ragged" (some
    rows). Every third row has many ties, and one holds a NaN.
    """

    def build(g: Generator) -> Args:
        target = zipf_logits(b * n, v, g).view(b, n, v)
        target[:, ::3] = target[:, ::3].round()
        target[1:2, 1:2, -1:] = torch.nan
        target = (target.softmax(-1) if kind == "probs" else target).to(dtype)
        allowed = some_allowed((b, n, v), torch.empty(b, 0, dtype=torch.int64), g)
        bitmask = packed_bits(allowed) if mask else None
        rows = torch.randint(0, max(n, 1), (b, n), generator=g)
        rows[::2, -1:], rows[1::2, :1], rows[2::3, :1] = -1, n, -2
        target_indptr = None
        if layout == "ragged":
            used, target_indptr = ragged(b, n - 1, g)
            target, bitmask = target[used], bitmask[used] if mask else None
        if layout == "sliced":
            target, rows = sliced(target), sliced(rows.to(torch.int32))
            bitmask = sliced(bitmask) if mask else None
        if layout == "plain":
            target, bitmask = target.flatten(0, 1), bitmask.flatten(0, 1) if mask else None
        return (
            *(target, rows if layout in ("sliced", "ragged") else None, target_indptr),
            *(KINDS.index(kind), k),
            *sampling(filters, b * n if layout == "plain" else b, v, g),
            bitmask,
        )

    words = [f"B{b}", f"n{n}", f"V{v}", f"k{k}", SHORT[dtype], kind, layout]
    words += [w for w in (filters,) if w != "off"] + ["mask"] * mask
    return Case("kept_tokens", "-".join(words), build, b * n, v)


KEPT_CASES: tuple[Case, ...] = (
    kept_case(4, 3, 131, k=64, filters="tensor", layout="ragged"),
    kept_case(5, 1, 1031, filters="tensor", layout="plain"),
    kept_case(3, 3, 517, bf16, k=40, filters="scalar", layout="sliced", mask=True),
    kept_case(2, 3, 67, f16, k=100, mask=True), kept_case(3, 3, 131, k=5, filters="zero"),
    kept_case(3, 2, 131, kind="probs", filters="tensor", layout="sliced"),
    kept_case(2, 2, 67, kind="probs", k=3, layout="plain", mask=True),
    kept_case(2, 2, 4097, bf16, k=1024), kept_case(1, 2, 2055, f16, k=1000, filters="warm"),
    kept_case(3, 2, 1, k=2, filters="topp"), kept_case(0, 3, 17), kept_case(2, 0, 17),
    kept_case(1, 1, 131073, bf16, k=20, mask=True), kept_case(1, 2, 151936, filters="topp"),
)  # fmt: skip
