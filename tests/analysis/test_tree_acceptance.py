"""How many nodes stand, in rationals; and which rule accepts more of two drafts."""

import itertools
from fractions import Fraction

import pytest
import torch
from support.providers import FAST_PROVIDERS, assert_close
from support.toy_chain import TOLERANCE
from support.toy_tree import DRAWN, ToyTree, sibling_distribution

from specdec_kernels import analysis
from specdec_kernels.analysis import lineage, tree_acceptance, tree_acceptance_bound

ONE, ZERO = Fraction(1), Fraction(0)


def normalised(weights):
    total = sum(weights)
    return [w / total for w in weights] if total else weights


def less(p, q):
    return [max(a - b, ZERO) for a, b in zip(p, q, strict=True)]


def ratio(p, q):
    return ONE if p and not q else min(ONE, p / q) if p else ZERO


# One point of a tree by the papers: P, children (node, token, group, Q) -> {node: chance}.


def multi_draft(p, children):
    out, left = {}, ONE
    for n, x, _, q in children:
        out[n] = left * ratio(p[x], q[x])
        left -= out[n]
        p = normalised(less(p, q))
    return out


def multi_draft_wor(p, children):
    out, left, laws = {}, ONE, {}
    for n, x, group, q in children:
        q_now = laws.get(group, q)
        out[n] = left * ratio(p[x], q_now[x])
        left -= out[n]
        p = normalised(less(p, q_now))
        laws[group] = normalised([ZERO if v == x else w for v, w in enumerate(q_now)])
    return out


def target_only(p, children):
    return {n: p[x] for n, x, *_ in reversed(children)}


def top_k_plus_one(p, children):
    *top, (n, x, _, q) = children
    ids = [t for _, t, *_ in top]
    off = normalised([ZERO if v in ids else w for v, w in enumerate(q)])
    taken = ratio(p[x], off[x])
    left = normalised([w if v in ids else max(w - off[v], ZERO) for v, w in enumerate(p)])
    return {**{m: (1 - taken) * left[t] for m, t, *_ in top}, n: taken}


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
    out, left = {}, ONE
    for n, x, *_ in children:
        out[n] = left * ratio(p[x], rho * q[x])
        left -= out[n]
    return out


POINTS = {
    "target_only": target_only,
    "multi_draft": multi_draft,
    "multi_draft_wor": multi_draft_wor,
    "top_k_plus_one": top_k_plus_one,
    "k_seq": k_seq,
}


class Tree:
    """One tuple of drafts: the rational P after each node (0 the root) and Q of each node."""

    def __init__(self, setting, drafts):
        self.x, self.parents = drafts, setting.parents
        self.nodes = range(len(drafts))
        path = [[drafts[m] for m in lineage(self.parents, n)] for n in range(-1, len(drafts))]
        self.p = [rationals(setting.target_probs[len(t)][tuple(t)]) for t in path]
        self.group = list(zip(self.parents, setting.drafter, strict=True))
        self.q = [rationals(setting.draft_probs[k][len(path[p + 1])][tuple(path[p + 1])])
                  for p, k in self.group]  # fmt: skip

    def walk(self, judge):
        """{node: probability that it is on the path}."""
        chances = {}

        def go(node, members, reach):
            below = [n for n in self.nodes if self.parents[n] in members]
            if not below or not reach:
                return
            given = [(n, self.x[n], self.group[n], self.q[n]) for n in below]
            for n, chance in judge(self.p[node + 1], given).items():
                chances[n] = chances.get(n, ZERO) + reach * chance
                go(n, [m for m in below if self.x[m] == self.x[n]], reach * chance)

        go(-1, [-1], ONE)
        return chances

    def traverse(self):
        """The same for rule traversal, arXiv 2505.12398."""
        ends = {}

        def visit(node, a, reach):
            """The probability that the node or one below stands, if it is come to."""
            p, found = self.p[node + 1], ZERO
            for n in [n for n in self.nodes if self.parents[n] == node]:
                q, x = self.q[n], self.x[n]
                come = reach * (1 - found)
                found += (1 - found) * visit(n, min(ONE, a * p[x] / q[x]), come)
                left = less([a * w for w in p], q)
                s = sum(left)
                a = s / (s + 1 - a) if s + 1 - a else ONE
                p = normalised(left) if s else p
            a = ONE if node == -1 else a
            ends[node] = ends.get(node, ZERO) + reach * (1 - found) * a
            return found + (1 - found) * a

        visit(-1, ONE, ONE)
        return {n: sum(w for m, w in ends.items() if n in lineage(self.parents, m))
                for n in self.nodes}  # fmt: skip


def rationals(row):
    return [Fraction(float(w)) for w in row]


def rational_nodes(setting):
    """[N] float64: the probability of each node, over all drafts."""
    out = torch.zeros(len(setting.parents), dtype=torch.float64)
    for drafts, weight in zip(setting.drafts.tolist(), setting.weights.tolist(), strict=True):
        tree = Tree(setting, drafts)
        up = setting.rule == "traversal"
        chances = tree.traverse() if up else tree.walk(POINTS[setting.rule])
        for n, chance in chances.items():
            out[n] += weight * float(chance)
    return out


COUNTED = {
    "21": dict(tree="21", seed=1),
    "22": dict(tree="22", seed=2),
    "3-V4": dict(tree="3", v=4, seed=3),
    "mixed": dict(tree="mixed", seed=4),
}
PAIRS = [(r, s) for r in (*POINTS, "traversal") for s in COUNTED]
PAIRS += [(r, "drafters") for r in ("multi_draft", "multi_draft_wor", "traversal")]


@pytest.mark.parametrize(("rule", "setting"), PAIRS)
def test_as_many_nodes_stand_as_in_rationals(rule, setting):
    options = COUNTED.get(setting) or dict(tree="22", drafters=2, seed=5)
    setting = ToyTree(rule, kind="probs", sixteenths=True, **options)
    law, want = setting.realized("cpp"), rational_nodes(setting)
    # Rule k_seq may take any rho within 1e-6 of the smallest.
    slack = 4 if rule == "k_seq" else 1
    assert_close("probability of nodes", law.nodes, want, atol=slack * TOLERANCE)
    assert law.mean_accepted == pytest.approx(float(want.sum()), abs=slack * TOLERANCE)


@pytest.mark.parametrize("name", [n for n in FAST_PROVIDERS if n != "cpp"])
@pytest.mark.parametrize("rule", POINTS)
def test_as_many_nodes_stand_as_in_rationals_by_other_providers(name, rule):
    setting = ToyTree(rule, tree=[-1, -1], kind="probs", sixteenths=True, seed=6)
    law = setting.realized(name)
    assert_close("probability of nodes", law.nodes, rational_nodes(setting), atol=4 * TOLERANCE)


# Two drafts of one token.

RULES = ("target_only", "multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq")
SAMPLED = RULES[1:]


def random_laws(v, n=4000, seed=0):
    """p, q [n, v] float64, from flat to peaked, a third of them with zeros, some equal."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.3 + 3 * torch.rand(2, n, 1, generator=generator, dtype=torch.float64)
    laws = (scale * torch.randn(2, n, v, generator=generator, dtype=torch.float64)).softmax(-1)
    dead = torch.rand(2, n, v, generator=generator) < 0.3
    dead[:, n // 3 :] = False
    dead[..., :2] = False  # two drafts can be drawn
    laws = laws.masked_fill(dead, 0.0)
    p, q = laws / laws.sum(-1, keepdim=True)
    q[:50] = p[:50]
    return p, q


def bound(p, q, drafts, rule):
    """Of the draft law that the rule is for."""
    if DRAWN[rule] == "independent":
        return analysis.acceptance_bound(p, q, drafts)
    return tree_acceptance_bound(p, q, drafts, DRAWN[rule])


@pytest.mark.parametrize("v", [3, 4, 5])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_a_rule_accepts_more_than_one_draft_would_and_no_more_than_the_bound(v, drafts):
    p, q = random_laws(v)
    single = analysis.acceptance_rate(p, q)
    for rule in RULES:
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
    p, q = random_laws(v)
    got = {rule: tree_acceptance(p, q, 2, rule) for rule in RULES}
    single = analysis.acceptance_rate(p, q)
    mean = {"token": float(single.mean()), **{r: float(x.mean()) for r, x in got.items()}}
    print(f"V={v}:", ", ".join(f"{r} {x:.4f}" for r, x in mean.items()))
    order = ["token", "multi_draft", "k_seq", "multi_draft_wor", "top_k_plus_one"]
    means = [mean[r] for r in order]
    assert means == sorted(means), mean


def test_target_only_and_top_k_plus_one_are_optimal_for_their_drafts():
    """The bound over all subsets, by brute force."""
    for v, drafts in itertools.product((3, 4, 5), (1, 2, 3)):
        p, q = random_laws(v, n=50, seed=v)
        for rule in ("target_only", "top_k_plus_one"):
            for a, b in zip(p, q, strict=True):
                if int((b > 0).sum()) < drafts:
                    continue
                tokens, weights = sibling_distribution(b.expand(drafts, -1), DRAWN[rule])
                assert brute_bound(a, tokens, weights) == pytest.approx(
                    float(tree_acceptance(a, b, drafts, rule)), abs=1e-12
                )


def brute_bound(p, tokens, weights):
    least = 0.0
    for inside in itertools.product([False, True], repeat=len(p)):
        s = torch.tensor(inside)
        least = min(least, float(p[s].sum() - weights[s[tokens].all(-1)].sum()))
    return 1 + least


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_bounds_are_those_of_their_draft_laws(drafts):
    p, q = random_laws(4, n=40, seed=1)
    for rule in ("multi_draft", "multi_draft_wor"):
        for a, b in zip(p, q, strict=True):
            if int((b > 0).sum()) >= drafts:
                given = sibling_distribution(b.expand(drafts, -1), DRAWN[rule])
                assert brute_bound(a, *given) == pytest.approx(
                    float(bound(a, b, drafts, rule)), abs=1e-12
                )


@pytest.mark.parametrize("drafts", [2, 3])
@pytest.mark.parametrize("v", [3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_accept_as_often_as_the_formula(rule, v, drafts):
    setting = ToyTree(rule, tree=[-1] * drafts, v=v, seed=v, holes=v == 4)
    want = float(tree_acceptance(setting.target_probs[0], setting.draft_probs[0][0], drafts, rule))
    assert setting.realized("cpp").mean_accepted == pytest.approx(want, abs=2 * TOLERANCE)


def test_what_is_no_rule_and_no_draw_is_named():
    p = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match=r"rule must be one of target_only, .*, got 'token'"):
        tree_acceptance(p, p, 2, "token")
    with pytest.raises(ValueError, match=r"draw must be one of .*, got 'independent'"):
        tree_acceptance_bound(p, p, 2, "independent")
    with pytest.raises(ValueError, match="drafts must be at least 1, got 0"):
        tree_acceptance(p, p, 0, "k_seq")
