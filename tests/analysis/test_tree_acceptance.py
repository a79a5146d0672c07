"""How often each tree rule accepts a node: kernels against rationals, and rules against bounds."""

import itertools
from fractions import Fraction

import pytest
import torch
from proofs import acceptance_bound, lineage
from support.providers import assert_close
from support.toy_chain import TOLERANCE
from support.toy_tree import DRAWN, ToyTree, sibling_distribution

from specdec_kernels import analysis
from specdec_kernels.analysis import (
    first_children_acceptance,
    tree_acceptance,
    tree_acceptance_bound,
)
from specdec_kernels.analysis.tree_acceptance import SIBLING_RULES

pytestmark = pytest.mark.slow

ONE, ZERO = Fraction(1), Fraction(0)


def normalized(weights):
    total = sum(weights)
    return [w / total for w in weights] if total else weights


def difference(p, q):
    return [max(a - b, ZERO) for a, b in zip(p, q, strict=True)]


class RationalTree:
    """A tree with drafted tokens: rational P after each node (0 is the root) and Q of each node."""

    def __init__(self, toy, drafts):
        self.x, self.parents = drafts, toy.parents
        self.nodes = range(len(drafts))
        path = [[drafts[m] for m in lineage(self.parents, n)] for n in range(-1, len(drafts))]
        self.p = [rationals(toy.target_probs[len(t)][tuple(t)]) for t in path]
        self.drawn_from = list(zip(self.parents, toy.drafter, strict=True))
        self.q = [rationals(toy.draft_probs[k][len(path[p + 1])][tuple(path[p + 1])])
                  for p, k in self.drawn_from]  # fmt: skip

    def upward(self):
        """{node: probability that it is on the path} of rule traversal (arXiv 2505.12398)."""
        ends = {}

        def visit(node, a, reach):
            """Probability that the node or a descendant is accepted, if the rule comes to it."""
            p, accepted = self.p[node + 1], ZERO
            for n in [n for n in self.nodes if self.parents[n] == node]:
                q, x = self.q[n], self.x[n]
                child = visit(n, min(ONE, a * p[x] / q[x]), reach * (1 - accepted))
                accepted += (1 - accepted) * child
                residual = difference([a * w for w in p], q)
                s = sum(residual)
                a = s / (s + 1 - a) if s + 1 - a else ONE
                p = normalized(residual) if s else p
            a = ONE if node == -1 else a
            ends[node] = ends.get(node, ZERO) + reach * (1 - accepted) * a
            return accepted + (1 - accepted) * a

        visit(-1, ONE, ONE)
        return {n: sum(w for m, w in ends.items() if n in lineage(self.parents, m))
                for n in self.nodes}  # fmt: skip


def rationals(row):
    return [Fraction(float(w)) for w in row]


def rational_nodes(toy):
    """[N] float64: the probability that each node is accepted, over all drafts."""
    out = torch.zeros(len(toy.parents), dtype=torch.float64)
    for drafts, weight in zip(toy.drafts.tolist(), toy.weights.tolist(), strict=True):
        for n, probability in RationalTree(toy, drafts).upward().items():
            out[n] += weight * float(probability)
    return out


@pytest.mark.parametrize("toy", [dict(tree="3", v=4, seed=3), dict(tree="mixed", seed=4)])
def test_nodes_are_accepted_as_often_as_in_rationals(toy):
    """Rule traversal, which goes upward; the others are compared with their formula below."""
    toy = ToyTree("traversal", kind="probs", sixteenths=True, **toy)
    realized, want = toy.realized("cpp"), rational_nodes(toy)
    assert_close("probability of nodes", realized.nodes, want, atol=TOLERANCE)
    assert realized.mean_accepted == pytest.approx(float(want.sum()), abs=TOLERANCE)


# Several drafts of one token.

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
    assert toy.realized("cpp").mean_accepted == pytest.approx(want, abs=2 * TOLERANCE)


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
