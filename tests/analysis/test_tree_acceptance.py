"""How often each tree rule accepts a node: kernels against rationals, and rules against bounds."""

import itertools
from fractions import Fraction

import pytest
import torch
from support.providers import assert_close
from support.toy_chain import TOLERANCE
from support.toy_tree import DRAWN, ToyTree, sibling_distribution

from specdec_kernels import analysis
from specdec_kernels.analysis import tree_acceptance, tree_acceptance_bound
from specdec_kernels.analysis.tree_acceptance import SIBLING_RULES
from specdec_kernels.testing import acceptance_bound, lineage

pytestmark = pytest.mark.slow

ONE, ZERO = Fraction(1), Fraction(0)


def normalized(weights):
    total = sum(weights)
    return [w / total for w in weights] if total else weights


def difference(p, q):
    return [max(a - b, ZERO) for a, b in zip(p, q, strict=True)]


def ratio(p, q):
    return ONE if p and not q else min(ONE, p / q) if p else ZERO


# The children of one node by the papers: P after the node and its children (node, token, row of the
# draft, Q) give the probability that each child is accepted, {node: probability}.


def multi_draft(p, children):
    out, rejected = {}, ONE
    for n, x, _, q in children:
        out[n] = rejected * ratio(p[x], q[x])
        rejected -= out[n]
        p = normalized(difference(p, q))
    return out


def multi_draft_wor(p, children):
    out, rejected, q_of = {}, ONE, {}
    for n, x, row, q in children:
        q_now = q_of.get(row, q)
        out[n] = rejected * ratio(p[x], q_now[x])
        rejected -= out[n]
        p = normalized(difference(p, q_now))
        q_of[row] = normalized([ZERO if v == x else w for v, w in enumerate(q_now)])
    return out


def target_only(p, children):
    return {n: p[x] for n, x, *_ in reversed(children)}


def top_k_plus_one(p, children):
    *top, (n, x, _, q) = children
    ids = [t for _, t, *_ in top]
    rest = normalized([ZERO if v in ids else w for v, w in enumerate(q)])
    accepted = ratio(p[x], rest[x])
    residual = normalized([w if v in ids else max(w - rest[v], ZERO) for v, w in enumerate(p)])
    return {**{m: (1 - accepted) * residual[t] for m, t, *_ in top}, n: accepted}


def k_seq(p, children):
    k, q = len(children), children[0][3]
    low, high = ONE, Fraction(k)

    def enough(rho):
        beta = sum(min(b, a / rho) for a, b in zip(p, q, strict=True))
        return 1 - (1 - beta) ** k <= rho * beta

    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    rho = ONE if enough(ONE) else high
    out, rejected = {}, ONE
    for n, x, *_ in children:
        out[n] = rejected * ratio(p[x], rho * q[x])
        rejected -= out[n]
    return out


ONE_LEVEL = {
    "target_only": target_only,
    "multi_draft": multi_draft,
    "multi_draft_wor": multi_draft_wor,
    "top_k_plus_one": top_k_plus_one,
    "k_seq": k_seq,
}


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

    def downward(self, decide):
        """{node: probability that it is on the path}, for a rule that goes from the root down."""
        on_path = {}

        def go(node, members, reach):
            below = [n for n in self.nodes if self.parents[n] in members]
            if not below or not reach:
                return
            given = [(n, self.x[n], self.drawn_from[n], self.q[n]) for n in below]
            for n, accepted in decide(self.p[node + 1], given).items():
                on_path[n] = on_path.get(n, ZERO) + reach * accepted
                go(n, [m for m in below if self.x[m] == self.x[n]], reach * accepted)

        go(-1, [-1], ONE)
        return on_path

    def upward(self):
        """The same for rule traversal (arXiv 2505.12398), from the leaves to the root."""
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
        tree = RationalTree(toy, drafts)
        upward = toy.rule == "traversal"
        on_path = tree.upward() if upward else tree.downward(ONE_LEVEL[toy.rule])
        for n, probability in on_path.items():
            out[n] += weight * float(probability)
    return out


TOYS = {
    "3-V4": dict(tree="3", v=4, seed=3),
    "mixed": dict(tree="mixed", seed=4),
    "drafters": dict(tree="22", drafters=2, seed=5),
}
PAIRS = [(rule, "mixed") for rule in ONE_LEVEL]  # three siblings follow further below
PAIRS += [("traversal", name) for name in TOYS]
PAIRS += [(rule, "drafters") for rule in ("multi_draft", "multi_draft_wor")]


@pytest.mark.parametrize(("rule", "name"), PAIRS)
def test_nodes_are_accepted_as_often_as_in_rationals(rule, name):
    toy = ToyTree(rule, kind="probs", sixteenths=True, **TOYS[name])
    realized, want = toy.realized("cpp"), rational_nodes(toy)
    # Rule k_seq may take any rho within 1e-6 of the smallest.
    slack = 4 if rule == "k_seq" else 1
    assert_close("probability of nodes", realized.nodes, want, atol=slack * TOLERANCE)
    assert realized.mean_accepted == pytest.approx(float(want.sum()), abs=slack * TOLERANCE)


# Several drafts of one token.

SAMPLED = tuple(rule for rule in SIBLING_RULES if rule != "target_only")


def random_distributions(v, n=4000, seed=0):
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


@pytest.mark.parametrize("v", [3, 4, 5])
def test_the_order_of_the_rules_for_two_drafts(v):
    p, q = random_distributions(v)
    mean = {rule: float(tree_acceptance(p, q, 2, rule).mean()) for rule in SIBLING_RULES}
    mean["token"] = float(analysis.acceptance_rate(p, q).mean())
    order = ["token", "multi_draft", "k_seq", "multi_draft_wor", "top_k_plus_one"]
    means = [mean[r] for r in order]
    assert means == sorted(means), mean


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


def test_errors_name_argument_rule_and_value():
    p = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match=r"rule must be one of target_only, .*, got 'token'"):
        tree_acceptance(p, p, 2, "token")
    with pytest.raises(ValueError, match=r"draw must be one of .*, got 'independent'"):
        tree_acceptance_bound(p, p, 2, "independent")
    with pytest.raises(ValueError, match="drafts must be at least 1, got 0"):
        tree_acceptance(p, p, 0, "k_seq")
