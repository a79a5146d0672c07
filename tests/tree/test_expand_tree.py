"""`expand_tree` against a float64 oracle, and inputs that its result does not depend on."""

from __future__ import annotations

import proofs
import pytest
import torch
from proofs import assert_all_equal, assert_close
from proofs.tree_layout_oracles import check_expansion
from support.providers import provider

import specdec_kernels as sk

OP = "expand_tree"
NAMES = [n for n in ("reference", "cpp", "triton") if n in proofs.providers(OP)]
# The interpreter takes seconds for each of these tests.
HEAVY = [pytest.param(n, marks=pytest.mark.full if n == "triton" else []) for n in NAMES]


def run(name, *args):
    """Run a provider with poisoned allocations."""
    torch.use_deterministic_algorithms(True)
    return provider(OP, name)(*args)


def pairs():
    light = [c for c in proofs.cases(OP) if c.vocabulary < 5000]
    return [
        pytest.param(n, c, id=f"{n}-{c}")
        for n in NAMES
        for c in (light if n == "triton" else proofs.cases(OP, heavy=True))
    ]


@pytest.mark.parametrize(("name", "case"), pairs())
def test_the_children_are_the_most_likely(name, case):
    args = case.args()
    check_expansion(args, run(name, *args))


@pytest.mark.parametrize("name", HEAVY)
def test_random_frontiers(name):
    g = torch.Generator().manual_seed(2)
    for seed in range(4 if name == "triton" else 80):
        b, f = (int(torch.randint(1, 4, (), generator=g)) for _ in range(2))
        v = int(torch.randint(1, 300, (), generator=g))
        width = int(torch.randint(1, 65, (), generator=g))
        logits = 3 * torch.randn(b, f, v, generator=g)
        if seed % 2:
            logits = logits.round()
        logits[torch.rand(b, f, v, generator=g) < 0.1] = -torch.inf
        scores = -torch.rand(b, f, generator=g)
        t = torch.rand(b, generator=g) if seed % 3 else None
        args = (logits, scores, width, t, 0.6)
        check_expansion(args, run(name, *args))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["falling", "rising", "equal"])
def test_every_order_of_a_row_over_tiles(name, order):
    """Falling: the first tile has the best tokens. Rising: every entry replaces a best token."""
    v = 8200
    logits = {
        "falling": -torch.arange(v) / 100,
        "rising": torch.arange(v) / 100,
        "equal": torch.zeros(v),
    }[order][None, None]
    args = (logits, torch.zeros(1, 1), 17, None, 1.0)
    check_expansion(args, run(name, *args))


@pytest.mark.parametrize("name", NAMES)
def test_the_signs_of_zero_tie(name):
    logits = torch.tensor([[[-1.0, -0.0, 0.0, -0.0, 0.0]]])
    tokens, _, _ = run(name, logits, torch.zeros(1, 1), 3, None, 1.0)
    assert tokens.tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize("name", HEAVY)
def test_an_invalid_row_has_no_children_and_does_not_change_other_nodes(name):
    g = torch.Generator().manual_seed(1)
    good = torch.randn(4, 2, 90, generator=g)
    logits = good.clone()
    for b, value in enumerate((torch.nan, torch.inf)):
        logits[b, 1, 70] = value
    logits[2, 1] = -torch.inf
    scores = torch.zeros(4, 2)
    for value in (torch.nan, torch.inf, -torch.inf):
        scores[3, 1] = value
        got = run(name, logits, scores, 3, None, 1.0)
        want = run(name, good, torch.zeros(4, 2), 3, None, 1.0)
        assert_all_equal([t[:, :1] for t in got[:2]], [t[:, :1] for t in want[:2]])
        assert (got[0][:, 1] == -1).all()
        assert (got[1][:, 1] == -torch.inf).all()
        assert got[2].tolist() == [[0, 1, 2]] * 4
    for bad in (torch.nan, torch.inf, -1.0):
        t = torch.tensor([1.0, bad, 1.0, 1.0])
        tokens, _, frontier = run(name, good, torch.zeros(4, 2), 3, t, 1.0)
        assert (tokens[1] == -1).all()
        assert (tokens[[0, 2, 3]] >= 0).all()
        assert frontier[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_nan_in_the_last_tile_leaves_a_node_without_children(name):
    logits = torch.zeros(1, 2, 9000)
    logits[0, 1, -1] = torch.nan
    tokens, _, _ = run(name, logits, torch.zeros(1, 2), 3, None, 1.0)
    assert tokens.tolist() == [[[0, 1, 2], [-1, -1, -1]]]


@pytest.mark.parametrize("name", NAMES)
def test_extreme_temperatures_and_logits(name):
    rows = torch.tensor([[[3.0, 2.0, -1e38, 3.0]], [[-3e38, 3e38, 0.0, -torch.inf]]])
    for t in (1e-38, 1e-3, 1e30):
        args = (rows, torch.tensor([[-2.0], [-1e38]]), 4, None, t)
        tokens, scores, _ = run(name, *args)
        want = proofs.providers(OP)["reference"](*args)
        assert_close("tokens", tokens, want[0])
        assert_close("scores", scores, want[1], atol=1e-5, rtol=1e-5)
        assert ((tokens == -1) == (scores == -torch.inf)).all()


def grown(logits, scores, lengths, size, slots):
    """Two levels of EAGLE-2, re-ranked, with their mask; logits do not depend on chosen nodes."""
    first = sk.expand_tree(logits[:, :1], scores[:, :1], width=3, temperature=0.9)
    best = first.scores.flatten(1).gather(1, first.frontier)
    second = sk.expand_tree(logits[:, 1:], best, width=3, temperature=0.9)
    b = len(logits)
    parents = torch.cat(
        [torch.full_like(first.frontier, -1), first.frontier.repeat_interleave(3, 1)], 1
    )
    tokens = torch.cat([first.tokens.view(b, 3), second.tokens.view(b, 9)], 1)
    candidates = torch.cat([first.scores.view(b, 3), second.scores.view(b, 9)], 1)
    tree = sk.rerank_tree(tokens, parents, candidates, size=size)
    return (*tree, *sk.tree_attention(tree.parents, lengths, slots=slots))


def test_a_grown_tree_holds_the_best_paths():
    """If the distribution does not depend on the path, EAGLE-2 finds the most likely tree."""
    g = torch.Generator().manual_seed(4)
    row = torch.randn(1, 1, 50, generator=g)
    logits = row.expand(1, 4, 50)
    chosen = grown(logits, torch.zeros(1, 1), torch.tensor([5]), 6, 12)
    logprobs = row[0, 0].double().div(0.9).log_softmax(-1).sort(descending=True)
    p, ids = logprobs.values[:3], logprobs.indices[:3]
    paths = [(float(p[i]), (int(ids[i]),)) for i in range(3)]
    paths += [(float(p[i] + p[j]), (int(ids[i]), int(ids[j]))) for i in range(3) for j in range(3)]
    want = {text for _, text in sorted(paths, reverse=True)[:6]}
    tokens, parents = chosen[0][0].tolist(), chosen[1][0].tolist()
    got = {(t,) if q < 0 else (tokens[q], t) for t, q in zip(tokens, parents, strict=True)}
    assert got == want
