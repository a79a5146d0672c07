"""How often each tree rule accepts one of several drafts: kernels, formulas and bounds."""

import itertools

import pytest
import torch
from proofs import acceptance_bound, assert_close
from proofs.toy_tree import DRAWN, ToyTree, sibling_distribution

from specdec_kernels import analysis
from specdec_kernels.analysis import (
    first_children_acceptance,
    tree_acceptance,
    tree_acceptance_bound,
)
from specdec_kernels.analysis.tree_acceptance import SIBLING_RULES

pytestmark = [pytest.mark.analysis, pytest.mark.slow]


SAMPLED = tuple(rule for rule in SIBLING_RULES if rule != "target_only")


def random_distributions(v, n=1000, seed=0):
    """P and Q [n, v] float64, from flat to peaked, a third of them with zeros, some equal."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.3 + 3 * torch.rand(2, n, 1, generator=generator, dtype=torch.float64)
    probs = (scale * torch.randn(2, n, v, generator=generator, dtype=torch.float64)).softmax(-1)
    dead = torch.rand(2, n, v, generator=generator) < 0.3
    dead[:, n // 3 :] = False
    dead[..., :2] = False  # leave two tokens to draw
    probs = probs.masked_fill(dead, 0.0)
    p, q = probs / probs.sum(-1, keepdim=True)
    q[:50] = p[:50]
    return p, q


def bound(p, q, drafts, rule):
    """The bound for drafts drawn as the rule demands."""
    if DRAWN[rule] == "independent":
        return acceptance_bound(p, q, drafts)
    return tree_acceptance_bound(p, q, drafts, DRAWN[rule])


@pytest.mark.parametrize("v", [3, 4, 5])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_a_rule_accepts_more_than_one_draft_would_and_no_more_than_the_bound(v, drafts):
    p, q = random_distributions(v)
    single = analysis.acceptance_rate(p, q)
    for rule in SIBLING_RULES:
        got, most = tree_acceptance(p, q, drafts, rule), bound(p, q, drafts, rule)
        if drafts == 3 and rule == "multi_draft_wor":
            live = (q > 0).sum(-1) >= 3
            got, most = got[live], most[live]
            assert bool((got >= single[live] - 1e-12).all())
        elif rule != "target_only":
            assert bool((got >= single - 1e-12).all()), rule
        assert bool((got <= most + 1e-12).all()), rule
    if drafts == 1:
        for rule in SAMPLED:
            assert_close(rule, tree_acceptance(p, q, 1, rule), single, atol=1e-12)


def brute_bound(p, tokens, weights):
    """1 + the minimum over all sets of tokens of P(set) - P(all drafts lie in the set)."""
    inside = torch.tensor(list(itertools.product([False, True], repeat=len(p))))
    covered = inside[:, tokens].all(-1)
    return 1 + float((inside.double() @ p - covered.double() @ weights).min())


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_bounds_equal_brute_force_and_two_rules_reach_theirs(drafts):
    p, q = random_distributions(4, n=40, seed=1)
    for rule in ("target_only", "top_k_plus_one", "multi_draft", "multi_draft_wor"):
        for a, b in zip(p, q, strict=True):
            if int((b > 0).sum()) < drafts:
                continue
            want = brute_bound(a, *sibling_distribution(b.expand(drafts, -1), DRAWN[rule]))
            assert float(bound(a, b, drafts, rule)) == pytest.approx(want, abs=1e-12)
            if rule in ("target_only", "top_k_plus_one"):
                got = float(tree_acceptance(a, b, drafts, rule))
                assert got == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("rule", SIBLING_RULES)
def test_kernels_accept_as_often_as_the_formula(rule):
    toy = ToyTree(rule, tree="3", v=4, seed=4, holes=True)
    want = float(tree_acceptance(toy.target_probs[0], toy.draft_probs[0][0], 3, rule))
    assert toy.realized("cpp").mean_accepted == pytest.approx(want, abs=2e-6)


def test_acceptance_of_the_first_children_follows_from_that_of_each_trial():
    """Children 0, 1, ... of rule target_only, of which the target draws at most one."""
    p = torch.tensor([0.4, 0.1, 0.3, 0.2])
    drawn = p[:3].tolist()
    tried = [1 - sum(drawn[:child]) for child in range(3)]
    by_trial = [drawn[child] / tried[child] for child in range(3)]
    assert first_children_acceptance(by_trial) == pytest.approx([0.4, 0.5, 0.8])
    q = torch.tensor([0.5, 0.2, 0.2, 0.1])
    alone = [float(tree_acceptance(p, q, k, "target_only")) for k in (1, 2, 3)]
    assert first_children_acceptance(by_trial) == pytest.approx(alone)
    assert first_children_acceptance([]) == []
    assert first_children_acceptance([1.0, 0.0]) == [1.0, 1.0]


def test_formulas_of_trees_name_argument_rule_and_value():
    p = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match=r"rule must be one of target_only, .*, got 'token'"):
        tree_acceptance(p, p, 2, "token")
    with pytest.raises(ValueError, match=r"draw must be one of .*, got 'independent'"):
        tree_acceptance_bound(p, p, 2, "independent")
    with pytest.raises(ValueError, match="drafts must be at least 1, got 0"):
        tree_acceptance(p, p, 0, "k_seq")
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"by_trial\[1\] must be in \[0, 1\], got {share}"):
            first_children_acceptance([0.5, share])
