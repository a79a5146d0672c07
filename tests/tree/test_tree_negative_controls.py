"""Negative controls: tree verifiers with the faults of published ones, which the suite rejects."""

import functools
from dataclasses import dataclass

import pytest
import torch
from support.providers import FAST_PROVIDERS
from support.toy_chain import assert_target_distribution, assert_wrong_distribution
from support.toy_tree import ToyTree

from specdec_kernels import analysis, testing
from specdec_kernels.arguments.tree import TreeArguments

pytestmark = pytest.mark.slow

# The rules (docs/rules.md) on probabilities in Python floats. `wrong` names the fault, if any.


@dataclass
class Family:
    """A node and its children.

    p: the target distribution after the node.
    children: (node, token, group, Q) of each child; children of a group were drawn together.
    uniforms: the uniforms of the sequence.
    """

    p: list
    children: list
    uniforms: list

    def uniform(self, node):
        return self.uniforms[node]


def normalised(weights):
    total = sum(weights)
    return [w / total for w in weights] if total > 0 else weights


def unnormalised_residual(p, q):
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def pick(weights, u):
    goal, run = u * sum(weights), 0.0
    for v, w in enumerate(weights):
        run += w
        if run > goal and w > 0:
            return v
    return max(v for v, w in enumerate(weights) if w > 0)


def one_by_one(family, wrong, without_replacement):
    """multi_draft and multi_draft_wor: (accepted child or None, P or the residual)."""
    p, changed, seen = family.p, {}, set()
    for n, x, group, full in family.children:
        if wrong == "duplicates dropped" and x in seen:
            continue
        seen.add(x)
        q = changed.get(group, full)
        u = family.uniform(family.children[0][0] if wrong == "one uniform for siblings" else n)
        if u * q[x] < p[x]:
            return n, p
        residual = unnormalised_residual(p, q)
        if sum(residual) > 0 and wrong != "no residual after a rejection":
            p = residual if wrong == "P not renormalised" else normalised(residual)
        if without_replacement:
            keep = wrong == "tried tokens stay in Q"
            untried = [0.0 if v == x and not keep else w for v, w in enumerate(q)]
            changed[group] = untried if wrong == "Q not renormalised" else normalised(untried)
    return None, p


def multi_draft(family, wrong):
    return *one_by_one(family, wrong, False), {}


def multi_draft_wor(family, wrong):
    return *one_by_one(family, wrong, True), {}


def target_only(family, wrong):
    """Compares a uniform with P of a child given the children before it, as a kernel of SGLang."""
    mass, residual, seen = 1.0, list(family.p), set()
    for n, x, *_ in family.children:
        if x in seen and wrong != "duplicates counted twice":
            continue
        seen.add(x)
        if family.uniform(n) * mass < family.p[x]:
            return n, residual, {}
        mass -= family.p[x]
        residual[x] = 0.0
    return None, residual if sum(residual) > 0 else family.p, {}


def top_k_plus_one(family, wrong):
    if not family.children:
        return None, family.p, {}
    *top, (n, x, _, q) = family.children
    ids = {t: m for m, t, *_ in top}
    off = [0.0 if v in ids else w for v, w in enumerate(q)]
    q = q if wrong == "Q instead of q'" else normalised(off)
    if x not in ids and family.uniform(n) * q[x] < family.p[x]:
        return n, family.p, {}
    weights = [w if v in ids else max(w - q[v], 0.0) for v, w in enumerate(family.p)]
    return None, weights if sum(weights) > 0 else family.p, ids


@functools.cache
def factor(p, q, k):
    return float(analysis.k_seq_factor(torch.tensor(p), torch.tensor(q), k)[0])


def k_seq(family, wrong):
    if not family.children:
        return None, family.p, {}
    p, q, k = family.p, family.children[0][3], len(family.children)
    rho = factor(tuple(p), tuple(q), k) * (0.9 if wrong == "rho below its optimum" else 1.0)
    for n, x, *_ in family.children:
        if family.uniform(n) * rho * q[x] < p[x]:
            return n, p, {}
    accepted = [min(b, a / rho) for a, b in zip(p, q, strict=True)]
    beta = sum(accepted)
    scale = (1 - (1 - beta) ** k) / beta if beta > 0 else 0.0
    residual = unnormalised_residual(p, [scale * w for w in accepted])
    return None, residual if sum(residual) > 0 else p, {}


def top_down(decide, wrong=None):
    def verify(tree):
        path, tokens, members = [], [], {-1}
        while True:
            children = [n for n in tree.nodes if tree.parents[n] in members]
            given = [(n, tree.tokens[n], tree.group[n], tree.draft_probs(n)) for n in children]
            p = tree.p[(path[-1] if path else -1) + 1]
            node, weights, ids = decide(Family(p, given, tree.uniforms), wrong)
            if node is None:
                y = pick(weights, tree.uniforms[tree.count + len(path)])
                if y not in ids:
                    return path, [*tokens, y]
                node = ids[y]
            x = tree.tokens[node]
            path.append(node)
            tokens.append(x)
            members = {n for n in children if tree.tokens[n] == x}

    return verify


def traversal(wrong=None):
    def verify(tree):
        def visit(path, a):
            node = path[-1] if path else -1
            p = tree.p[node + 1]
            for n in [n for n in tree.nodes if tree.parents[n] == node]:
                q, x = tree.draft_probs(n), tree.tokens[n]
                ratio = a * p[x] / q[x] if q[x] > 0 else float(p[x] > 0)
                found = visit([*path, n], ratio if wrong == "uncapped ratio" else min(1.0, ratio))
                if found:
                    return found
                scaled = [w if wrong == "residual without a" else a * w for w in p]
                residual = unnormalised_residual(scaled, q)
                mass = sum(residual)
                if mass > 0:
                    p = normalised(residual)
                a = mass / (mass + 1 - a) if mass > 0 else 1.0 - (a < 1)
            if path and tree.uniforms[node] >= a:
                return None
            y = pick(p, tree.uniforms[tree.count + len(path)])
            return path, [tree.tokens[n] for n in path] + [y]

        return visit([], 1.0)

    return verify


class DraftedTree:
    """The tree of one sequence, with lists for its rows."""

    def __init__(self, a, b, rows):
        self.tokens, self.parents = a.tree_tokens[b].tolist(), a.parents[b].tolist()
        self.count = len(self.tokens)
        self.nodes = []
        for n, x in enumerate(self.tokens):
            if x >= 0 and (self.parents[n] < 0 or self.parents[n] in self.nodes):
                self.nodes.append(n)
        self.uniforms, self.p, self.q = (r[b] for r in rows)
        self.rows = a.draft_rows[b].tolist()
        self.group = [(p, r) for p, r in zip(self.parents, self.rows, strict=True)]

    def draft_probs(self, node):
        return self.q[self.rows[node]]


def as_op(verify):
    """The op `verify_tree` from a function of one DraftedTree."""

    def run(*args):
        a = TreeArguments(*args)
        b, n = a.tree_tokens.shape
        path, tokens = torch.full((b, n), -1), torch.full((b, n + 1), -1)
        rows = [x.double().tolist() for x in (a.uniforms, a.target, a.draft)]
        for i in range(b):
            nodes, emitted = verify(DraftedTree(a, i, rows))
            path[i, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
            tokens[i, : len(emitted)] = torch.tensor(emitted)
        return path, tokens, (path >= 0).sum(-1), torch.zeros(b, dtype=torch.int32)

    return run


def enumerated(rule, verify, **options):
    """(distribution of what a verifier emits, its ToyTree)."""
    setting = ToyTree(rule, **{"tree": "21", "kind": "probs", "seed": 2, **options})
    run = setting.verifier(as_op(verify))
    realized = testing.enumerate_tree_distribution(
        run, setting.parents, setting.drafts, setting.weights, setting.target_probs,
        upward=rule == "traversal", steps=26,
    )  # fmt: skip
    return realized, setting


RULES = {
    "multi_draft": multi_draft,
    "multi_draft_wor": multi_draft_wor,
    "target_only": target_only,
    "top_k_plus_one": top_k_plus_one,
    "k_seq": k_seq,
}


def verifier(rule, wrong=None):
    return traversal(wrong) if rule == "traversal" else top_down(RULES[rule], wrong)


@pytest.mark.parametrize("with_like", [False, True])
@pytest.mark.parametrize("rule", ["target_only", "multi_draft", "traversal"])
def test_a_cdf_that_ends_below_1_is_rejected(rule, with_like):
    setting = ToyTree(rule, tree="21")
    right, nodes = setting.verifier("cpp"), len(setting.parents)

    def wrong(drafts, uniforms):
        path, tokens = right(drafts, uniforms)
        late = (uniforms[:, nodes:] > 1 - 1e-5).any(-1)
        tokens[late, (tokens[late] >= 0).sum(-1) - 1] = setting.v
        return path, tokens

    with pytest.raises(ValueError, match="outside of the vocabulary"):
        testing.enumerate_tree_distribution(
            wrong, setting.parents, setting.drafts, setting.weights, setting.target_probs,
            upward=rule == "traversal", steps=26, like=right if with_like else None,
        )  # fmt: skip


@pytest.mark.parametrize("rule", [*RULES, "traversal"])
@pytest.mark.parametrize("tree", ["21", "3"])
def test_a_correct_rule_passes(rule, tree):
    assert_target_distribution(*enumerated(rule, verifier(rule), tree=tree))


def test_a_correct_rule_for_two_drafters_passes():
    assert_target_distribution(
        *enumerated("multi_draft_wor", verifier("multi_draft_wor"), tree="3", drafters=2)
    )


WRONG = [
    ("multi_draft", "no residual after a rejection", {}),
    ("multi_draft", "P not renormalised", {}),
    ("multi_draft", "duplicates dropped", {}),
    ("multi_draft_wor", "no residual after a rejection", {}),
    ("multi_draft_wor", "P not renormalised", {}),
    ("multi_draft_wor", "tried tokens stay in Q", dict(tree="3")),
    ("multi_draft_wor", "Q not renormalised", dict(tree="3")),
    ("multi_draft_wor", "duplicates dropped", dict(drafters=2)),
    ("target_only", "duplicates counted twice", dict(how="independent")),
    ("top_k_plus_one", "Q instead of q'", {}),
    ("k_seq", "rho below its optimum", {}),
    ("traversal", "residual without a", {}),
    ("traversal", "uncapped ratio", {}),
]


@pytest.mark.parametrize(("rule", "wrong", "options"), WRONG,
                         ids=[f"{r}-{w}" for r, w, _ in WRONG])  # fmt: skip
def test_a_wrong_rule_is_rejected(rule, wrong, options):
    assert_wrong_distribution(*enumerated(rule, verifier(rule, wrong), v=4, **options))


@pytest.mark.parametrize("rule", ["multi_draft", "multi_draft_wor"])
def test_a_uniform_that_siblings_share_is_rejected(rule):
    with pytest.raises(ValueError, match="not constant in a cell"):
        enumerated(rule, verifier(rule, "one uniform for siblings"), tree="3", v=4)


# A rule may be lossless for drafts that are drawn in another way than it was designed for:
# target_only and multi_draft_wor ignore a repeated draft, top_k_plus_one takes any tokens as top.
LOSSLESS = [("multi_draft_wor", "independent"), ("top_k_plus_one", "without_replacement"),
            ("target_only", "independent")]  # fmt: skip


@pytest.mark.parametrize(("rule", "how"), LOSSLESS)
def test_a_rule_is_lossless_for_drafts_drawn_in_another_way(rule, how):
    setting = ToyTree(rule, tree="3", v=4, how=how, seed=2)
    assert_target_distribution(setting.realized("cpp"), setting)


# Wrong calls of correct kernels: drafts that the rule is not lossless for, or wrong distributions.

CALLS = {
    "multi_draft of drafts without replacement": (
        "multi_draft", dict(how="without_replacement")),
    "multi_draft of the likeliest": ("multi_draft", dict(how="top")),
    "k_seq of drafts without replacement": ("k_seq", dict(how="without_replacement")),
    "k_seq of two distributions": ("k_seq", dict(drafters=2)),
    "top_k_plus_one of the likeliest": ("top_k_plus_one", dict(how="top")),
    "traversal of drafts without replacement": ("traversal", dict(how="without_replacement")),
    "greedy where tokens are sampled": ("greedy", {}),
    "typical": ("typical", dict(how="top")),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_a_wrong_call_is_rejected(name, call):
    rule, options = CALLS[call]
    setting = ToyTree(rule, **{"tree": "21", "seed": 2, **options})
    assert_wrong_distribution(setting.realized(name, steps=26), setting)


@pytest.mark.parametrize("rule", ["multi_draft", "multi_draft_wor", "traversal"])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_one_distribution_for_the_drafts_of_two_models_is_rejected(name, rule):
    setting = ToyTree(rule, tree=[-1, -1], v=4, drafters=2, seed=2)

    def change(arguments):
        rows = arguments["draft_rows"]
        return {**arguments, "draft_rows": rows - rows % 2}

    assert_wrong_distribution(setting.realized(name, steps=26, change=change), setting)
