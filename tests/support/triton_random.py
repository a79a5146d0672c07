"""Random arguments of every kind that the ops take, for Triton's interpreter."""

from __future__ import annotations

import itertools
import random

import torch

from specdec_kernels.arguments import rules

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
RULES = ("token", "token", "block", "block", "block", "lenient", "typical", "synthetic", "match",
         "greedy", "top_beta")  # fmt: skip


def logits(rows, v, generator, dtype):
    return (3 * torch.randn(*rows, v, generator=generator)).to(dtype)


def poison(t, rnd):
    """Set one entry to a value that is invalid, or valid only in a one-hot row (-inf elsewhere)."""
    if t.numel():
        t.view(-1)[rnd.randrange(t.numel())] = rnd.choice(
            [float("nan"), float("inf"), float("-inf"), -1.0]
        )


def per_sequence(rnd, n, values, dtype=torch.float32):
    return torch.tensor([rnd.choice(values) for _ in range(n)], dtype=dtype)


def random_sampling(rnd, n, v):
    """The eight sampling arguments: scalars and tensors, some of them out of range."""
    out = [
        None, rnd.choice([1.0, 1.0, 0.7, 0.0, 1e-30, 1e30]), None, rnd.choice([0, 0, 3, 50]),
        None, rnd.choice([1.0, 1.0, 0.9, 0.3]), None, rnd.choice([0.0, 0.0, 0.05, 1.0]),
    ]  # fmt: skip
    if rnd.random() < 0.4:
        out[0] = per_sequence(rnd, n, [1.0, 0.7, 0.0, 2.0, -1.0])
    if rnd.random() < 0.3:
        out[2] = per_sequence(rnd, n, [0, 4, -1, v], torch.int32)
    if rnd.random() < 0.3:
        out[4] = per_sequence(rnd, n, [1.0, 0.5, 1.0, 0.0])
    if rnd.random() < 0.3:
        out[6] = per_sequence(rnd, n, [0.0, 0.01, 0.0])
    return out


def sample_statistics(draft, indptr, lengths, gamma, rnd):
    """A draft's logsumexp and threshold [B, gamma], as `sample` gives them, and its temperature."""
    temperature = rnd.choice([1.0, 0.8, 0.0])
    total = (draft.float().double() / (temperature or 1)).logsumexp(-1)
    if draft.dim() == 2:
        flat, total = total, torch.zeros(len(lengths), gamma, dtype=torch.float64)
        for b, n in enumerate(lengths):
            first = int(indptr[b]) - b
            total[b, : n - 1] = flat[first : first + n - 1]
    cut = rnd.choice([float("-inf"), 0.0])
    return total, torch.full(total.shape, cut), temperature


def sparse(draft, v, g):
    """(ids, probabilities) of the likeliest tokens: one id twice, one unused, one out of range."""
    k = min(draft.shape[-1], 5)
    ids = draft.float().topk(k, -1).indices.to(torch.int32)
    rows = torch.rand(ids.shape, generator=g)
    rows = rows / rows.sum(-1, keepdim=True)
    if k > 3:
        ids[..., 1] = ids[..., 0]
        ids[..., 2] = -1
        ids[::2, ..., 3] = v + 3
    return ids, rows


def random_draft(rnd, g, target, lengths, gamma, indptr, kind):
    """(draft, ids, columns, logsumexp, threshold, temperature) in one of its forms."""
    n, v = len(lengths), target.shape[-1]
    form = rnd.choice(["none", "plain", "plain", "sampled", "sparse"])
    flat = indptr is not None and rnd.random() < 0.5
    d = v if rnd.random() < 0.6 else rnd.choice([max(1, v // 2), v + 7, 4099])
    draft = logits((sum(lengths) - n,) if flat else (n, gamma), d, g, torch.float32)
    if indptr is None and d == v and rnd.random() < 0.7:
        draft = target[:, :gamma] + 0.5 * draft
    ids = columns = total = cut = None
    temperature = 1.0
    if form == "sparse":
        ids, draft = sparse(draft, v, g)
    else:
        if rnd.random() < 0.4:
            columns = torch.full((v,), -1, dtype=torch.int32)
            known = torch.randperm(v, generator=g)[: min(v, d)]
            columns[known] = torch.randperm(d, generator=g)[: len(known)].to(torch.int32)
        if kind == "probs" and form == "plain":
            draft = draft.softmax(-1)
    draft = draft.to(rnd.choice([target.dtype, torch.float32, torch.bfloat16]))
    if rnd.random() < 0.2:
        poison(draft, rnd)
    if form == "sampled":
        total, cut, temperature = sample_statistics(draft, indptr, lengths, gamma, rnd)
    return (None,) * 5 + (1.0,) if form == "none" else (draft, ids, columns, total, cut,
                                                        temperature)  # fmt: skip


def likely_tokens(target, draft, ids, gamma, indptr, v, rnd, g):
    """[B, gamma] drafts: some are accepted, some are out of range."""
    n = len(target) if indptr is None else len(indptr) - 1
    tokens = torch.randint(0, v, (n, gamma), generator=g)
    if indptr is None and rnd.random() < 0.6:
        tokens = target[:, :gamma].float().nan_to_num().argmax(-1)
    elif indptr is None and ids is not None:
        tokens = ids[..., 0].long()
    if tokens.numel() and rnd.random() < 0.2:
        tokens.view(-1)[rnd.randrange(tokens.numel())] = rnd.choice([-1, -5, v, v + 2])
    return tokens.to(rnd.choice([torch.int32, torch.int64]))


def random_chain(seed):
    """Arguments of `verify_chain`, of every kind that it takes."""
    rnd, g = random.Random(seed), torch.Generator().manual_seed(seed)
    v, gamma, n = rnd.choice([1, 5, 37, 67, 1031, 5000]), rnd.randrange(4), rnd.randrange(1, 4)
    kind, rule = rnd.choice(["logits", "logits", "probs"]), rnd.choice(RULES)
    indptr, lengths = None, [gamma + 1] * n
    if rnd.random() < 0.4:
        lengths = [rnd.randrange(1, gamma + 2) for _ in range(n)]
        indptr = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    target = logits((n, gamma + 1) if indptr is None else (sum(lengths),), v, g, torch.float32)
    draft, ids, columns, total, cut, q_temperature = random_draft(
        rnd, g, target, lengths, gamma, indptr, kind
    )
    if kind == "probs":
        target = target.softmax(-1)
    target = target.to(rnd.choice(list(DTYPES.values())))
    if rnd.random() < 0.2:
        poison(target, rnd)
    tokens = likely_tokens(target, draft, ids, gamma, indptr, v, rnd, g)
    q_temperatures = None
    if total is not None and rnd.random() < 0.5:
        q_temperatures = torch.full((n,), q_temperature)
    uniforms = None
    if rule != "match" and rnd.random() < 0.5:
        uniforms = torch.rand(n, gamma + 1, generator=g, dtype=torch.float64)
    rates = torch.rand(gamma, generator=g) if rule == "synthetic" else None
    ends = tokens.flatten()[:2].long() if rnd.random() < 0.3 else None
    most = torch.randint(-1, gamma + 3, (n,), generator=g) if rnd.random() < 0.3 else None
    return (
        target, tokens, draft, ids, columns, total, cut, q_temperatures, q_temperature,
        rules.KINDS.index(kind), rules.RULES.index(rule), *random_sampling(rnd, n, v),
        torch.randint(-(2**62), 2**62, (n,), generator=g),
        torch.randint(0, 2**40, (n,), generator=g), indptr, uniforms,
        rnd.choice([1.0, 0.5, 0.1]), rnd.choice([0.09, 0.5, 1.0]), rnd.choice([0.3, 2.0]),
        rnd.choice([1, 3, 2**40]), rnd.choice([0.0, 1.0, float("inf")]), rates,
        ends, most, rnd.random() < 0.8, rnd.random() < 0.8,
    )  # fmt: skip
