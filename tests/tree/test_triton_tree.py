"""`verify_tree` of the Triton provider in the interpreter, against the specification.

The interpreter takes up to a second for each row. Trees are therefore small, and each rule, form of
draft and limit has few settings. tests/chain/test_triton_chain.py compiles the kernels for devices.
"""

import itertools
import os
import random

import pytest

pytest.importorskip("triton")
os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated

import torch
from support.providers import (
    OUTPUTS,
    assert_close,
    record_allocations,
    verify_tree,
)
from support.triton_random import DTYPES, logits, per_sequence, poison, random_sampling, sparse

from specdec_kernels import reference
from specdec_kernels.arguments.rules import TREE_RULES, TREE_RULES_READING_DRAFT
from specdec_kernels.triton import launch
from specdec_kernels.triton.tree import verify_tree as tree

FORMS = ("none", "rows", "sampled", "sparse", "mapped")


def random_tree(rnd, n, b, v):
    """(tokens, parents) [B, N]: with siblings of equal tokens, absent nodes and invalid values."""
    tokens = torch.tensor([[rnd.randrange(min(v, 5)) for _ in range(n)] for _ in range(b)])
    parents = torch.tensor(
        [[rnd.choice([-1, rnd.randrange(-1, i), i - 1]) for i in range(n)] for _ in range(b)]
    )
    if n and rnd.random() < 0.3:
        tokens[rnd.randrange(b), rnd.randrange(n)] = rnd.choice([-1, -1, -5, v, v + 2])
    if n and rnd.random() < 0.1:
        parents[rnd.randrange(b), rnd.randrange(n)] = rnd.choice([-2, n])
    ids = [torch.int32, torch.int64]
    return tokens.view(b, n).to(rnd.choice(ids)), parents.view(b, n).to(rnd.choice(ids))


def random_drafts(rnd, g, target, parents, kind, form):
    """(draft, keywords): rows in one form, some of them shared by the children of one node."""
    n, v, b = parents.shape[1], target.shape[-1], len(parents)
    shared, flat = rnd.random() < 0.6, rnd.random() < 0.3
    if form == "none":
        return None, {"draft_rows": (parents + 1).clamp(0, n).int()} if shared else {}
    m, more = n, {}
    if shared or flat:
        m = n + 1
        more["draft_rows"] = (parents + 1).clamp(0, n).to(torch.int32)
        if n and rnd.random() < 0.1:
            more["draft_rows"][0, rnd.randrange(n)] = rnd.choice([-1, m, 2**30])
    d = v if form == "sparse" or rnd.random() < 0.6 else rnd.choice([max(1, v // 2), v + 7])
    draft = logits((m,) if flat else (b, m), d, g, torch.float32)
    draft[..., : min(d, 5)] += 3  # the drafted tokens are among these
    if form == "sparse":
        more["ids"], draft = sparse(draft, v, g)
    elif form == "mapped":
        columns = torch.full((v,), -1, dtype=torch.int32)
        known = torch.randperm(v, generator=g)[: min(v, d)]
        columns[known] = torch.randperm(d, generator=g)[: len(known)].to(torch.int32)
        more["columns"] = columns
    sampled = form == "sampled" or (form == "mapped" and rnd.random() < 0.5)
    if kind == "probs" and form != "sparse" and not sampled:
        draft = draft.softmax(-1)
    draft = draft.to(rnd.choice(list(DTYPES.values())))
    if rnd.random() < 0.15:
        poison(draft, rnd)
    if sampled:
        t = rnd.choice([1.0, 0.8, 0.0])
        total = (draft.double() / (t or 1)).logsumexp(-1)
        cut = torch.full(total.shape, rnd.choice([float("-inf"), 0.0]))
        more["sampled"] = (total, cut, torch.full((b,), t) if rnd.random() < 0.5 else t)
    return draft, more


def random_call(seed, rule=None, form=None):
    """(positional, keyword) arguments of `providers.verify_tree`, of every kind that it takes."""
    rnd, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rule, form = rule or rnd.choice(TREE_RULES), form or rnd.choice(FORMS)
    if rule == "k_seq" and form == "none":
        form = "rows"
    v, n, b = rnd.choice([1, 5, 19, 37, 67, 4100]), rnd.choice([0, 1, 3, 5, 7]), rnd.randrange(1, 3)
    kind = rnd.choice(["logits", "logits", "probs"])
    tokens, parents = random_tree(rnd, n, b, v)
    indptr, lengths = None, [n + 1] * b
    if rnd.random() < 0.3:
        lengths = [rnd.randrange(n + 2) for _ in range(b)]
        indptr = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    target = logits((b, n + 1) if indptr is None else (sum(lengths),), v, g, torch.float32) / 2
    target[..., : min(v, 5)] += 3
    draft, more = random_drafts(rnd, g, target, parents, kind, form)
    if kind == "probs":
        target = target.softmax(-1)
    target = target.to(rnd.choice(list(DTYPES.values())))
    if rnd.random() < 0.1:
        poison(target, rnd)
    t, temperature, k, top_k, p, top_p, m, min_p = random_sampling(rnd, b, v)
    more |= {
        "temperature": temperature if t is None else t, "top_k": top_k if k is None else k,
        "top_p": top_p if p is None else p, "min_p": min_p if m is None else m,
    }  # fmt: skip
    if rnd.random() < 0.5:
        more |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if rule != "match" and rnd.random() < 0.4:
        more["uniforms"] = torch.rand(b, 2 * n + 1, generator=g, dtype=torch.float64)
    if rnd.random() < 0.2:
        more["eos_token_ids"] = tokens.flatten()[:2].long()
    if rnd.random() < 0.2:
        more["max_new_tokens"] = per_sequence(rnd, b, [-1, 0, 1, 2, n + 2], torch.int64)
    if rnd.random() < 0.2:
        more["max_depth"] = rnd.randrange(n + 1)
    more |= {
        "rule": rule, "kind": kind, "target_indptr": indptr,
        "epsilon": rnd.choice([0.09, 0.5, 1.0]), "delta": rnd.choice([0.3, 2.0]),
        "logprobs": rnd.random() < 0.8, "accept_probs": rnd.random() < 0.8,
        "seeds": torch.randint(-(2**62), 2**62, (b,), generator=g),
        "positions": torch.randint(0, 2**40, (b,), generator=g),
    }  # fmt: skip
    return (target, tokens, parents, draft), more


def compared(seed, got, want):
    for name, g, w in zip(OUTPUTS["verify_tree"], got, want, strict=True):
        tolerance = {"logprobs": 1e-4, "accept_probs": 1e-4}.get(name, 0.0)
        assert_close(f"seed {seed}: {name}", g, w, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("rule", TREE_RULES)
def test_random_trees_equal_the_specification(rule, part):
    for i, form in enumerate(FORMS if rule in TREE_RULES_READING_DRAFT else FORMS[:2]):
        for seed in range(4 * i + 2 * part, 4 * i + 2 * part + 2):
            args, options = random_call(seed, rule, form)
            want = verify_tree(reference.verify_tree, *args, **options)
            compared(seed, verify_tree(tree.verify_tree, *args, **options), want)


# Siblings.


def siblings(tokens):
    """[1, N] tokens that are all children of the root, their parents, and draft rows of zeros."""
    n = len(tokens)
    return torch.tensor([tokens]), torch.full((1, n), -1), torch.zeros(1, n, dtype=torch.int32)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("near", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("k", [2, 3, 8])
def test_the_factor_of_k_seq_is_the_smallest_that_is_lossless(k, near):
    """rho is computed from the acceptance probability P(x) / (rho * Q(x)) of one token."""
    g = torch.Generator().manual_seed(k)
    p, q = torch.randn(2, 23, generator=g).mul(2).softmax(-1)
    q = (1 - near) * q + near * p
    x = int((q / p).argmax())
    tokens, parents, rows = siblings([x] * k)
    target = p.expand(1, k + 1, 23).contiguous()
    draft = q.expand(1, 1, 23).contiguous()
    out = verify_tree(
        tree.verify_tree, target, tokens, parents, draft, rule="k_seq", kind="probs",
        draft_rows=rows, uniforms=torch.full((1, 2 * k + 1), 0.999999, dtype=torch.float64),
    )  # fmt: skip
    rho = float(p[x].double() / q[x].double()) / float(out[5][0, 0])
    beta = torch.minimum(q.double(), p.double() / rho).sum().clamp(max=1)
    least = torch.minimum(q.double(), p.double() / (rho - 4e-6)).sum().clamp(max=1)
    assert 1 - (1 - beta) ** k <= rho * beta + 1e-6
    assert rho <= 1 + 4e-6 or 1 - (1 - least) ** k > (rho - 4e-6) * least - 1e-7


def test_without_replacement_the_rest_of_a_peaked_draft_is_accurate():
    """The first sibling has all but 1e-9 of Q, so the rest of Q decides about the second."""
    v = 50
    q = torch.full((1, 1, v), -24.0)
    q[..., 7] = 0.0
    q[..., 9] = -21.0
    target = torch.zeros(1, 3, v)
    target[..., 7] = -30.0
    tokens, parents, rows = siblings([7, 9])
    u = torch.full((1, 5), 0.99, dtype=torch.float64)
    args = (target, tokens, parents, q)
    options = {"rule": "multi_draft_wor", "draft_rows": rows, "uniforms": u}
    want = verify_tree(reference.verify_tree, *args, **options)
    got = verify_tree(tree.verify_tree, *args, **options)
    assert_close("accept_probs", got[5], want[5], rtol=1e-6)
    assert 0.01 < float(want[5][0, 1]) < 0.5


def test_traversal_counts_the_draft_of_every_token_beyond_a_tiny_vocabulary():
    """V = 2: the rejected token 2 has most of Q, and the acceptance of token 1 depends on it."""
    target = torch.tensor([0.7, 0.3]).expand(1, 4, 2).contiguous()
    draft = torch.tensor([0.1, 0.25, 0.6, 0.05]).expand(1, 1, 4).contiguous()
    tokens, parents, rows = siblings([2, 1, 0])
    options = {"rule": "traversal", "kind": "probs", "draft_rows": rows,
               "uniforms": torch.full((1, 7), 0.99999, dtype=torch.float64)}  # fmt: skip
    args = (target, tokens, parents, draft)
    want = verify_tree(reference.verify_tree, *args, **options)
    compared("tiny", verify_tree(tree.verify_tree, *args, **options), want)
    assert 0.3 < float(want[5][0, 1]) < 0.31


@pytest.mark.parametrize("rule", ["multi_draft", "multi_draft_wor", "traversal"])
def test_many_siblings_of_several_rows_in_many_tiles(rule, monkeypatch):
    """Tiles of 256; siblings share draft rows, also with other rows tried in between."""
    monkeypatch.setattr(launch, "TILE", 256)
    monkeypatch.setattr(launch, "CHUNK", 256)
    monkeypatch.setattr(launch, "MAX_BLOCK", 16)
    launch.tiling.cache_clear()
    g = torch.Generator().manual_seed(4)
    v, n = 600, 7
    target, draft = torch.randn(1, n + 1, v, generator=g), torch.randn(1, 3, 700, generator=g)
    tokens = torch.tensor([[1, 300, 599, 300, 2, 650, 3]])
    draft[..., tokens[0]] += 5
    rows = torch.tensor([[0, 0, 1, 0, 1, 2, 2]], dtype=torch.int32)
    u = torch.full((1, 2 * n + 1), 0.9999, dtype=torch.float64)
    u[:, n:] = 0.37
    args = (target, tokens, torch.full((1, n), -1), draft)
    options = {"rule": rule, "draft_rows": rows, "uniforms": u}
    want = verify_tree(reference.verify_tree, *args, **options)
    compared(rule, verify_tree(tree.verify_tree, *args, **options), want)
    launch.tiling.cache_clear()
    assert int(want[2]) == 0


def test_scratch_is_a_few_numbers_a_tile_and_a_node(monkeypatch):
    """No allocation is as large as the rows."""
    sizes = record_allocations(monkeypatch)
    b, n, v = 2, 5, 9000
    nodes = torch.zeros(b, n, dtype=torch.int64)
    verify_tree(
        tree.verify_tree, torch.zeros(b, n + 1, v), nodes, nodes - 1, torch.zeros(b, n, v),
        rule="traversal", max_new_tokens=torch.zeros(b).long(),
    )  # fmt: skip
    assert max(sizes) <= b * max(3 * launch.tiling(v).tiles, 16 * (n + 1))


def test_an_empty_batch_launches_nothing():
    none = torch.zeros(0, 2, dtype=torch.int32)
    out = verify_tree(tree.verify_tree, torch.zeros(0, 3, 7), none, none, rule="greedy")
    assert [tuple(t.shape) for t in out] == [(0, 2), (0, 3), (0,), (0,), (0, 3), (0, 2)]
