"""Verifiers of trees that are wrong in the ways others shipped: the suite must reject each."""

import functools
from dataclasses import dataclass

import pytest
import torch
from support.providers import FAST_PROVIDERS
from support.toy_tree import ToyTree, assert_target_distribution, assert_wrong_distribution

from specdec_kernels import analysis
from specdec_kernels.arguments.tree import TreeArguments

# Rules in Python floats, on probabilities. `wrong` names the fault, if there is one.


@dataclass
class Point:
    """Where the path has come to: P, and (node, token, group, Q) of each child.

    uniforms: of the sequence. Nodes of a group were drawn together.
    """

    p: list
    children: list
    uniforms: list

    def coin(self, node):
        return self.uniforms[node]


def normalised(weights):
    total = sum(weights)
    return [w / total for w in weights] if total > 0 else weights


def less(p, q):
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def pick(weights, u):
    goal, run = u * sum(weights), 0.0
    for v, w in enumerate(weights):
        run += w
        if run > goal and w > 0:
            return v
    return max(v for v, w in enumerate(weights) if w > 0)


def one_by_one(point, wrong, without_replacement):
    """multi_draft and multi_draft_wor: the child that stands, and what else is drawn from."""
    p, changed, seen = point.p, {}, set()
    for n, x, group, full in point.children:
        if wrong == "duplicates dropped" and x in seen:
            continue
        seen.add(x)
        q = changed.get(group, full)
        coin = point.coin(point.children[0][0] if wrong == "one coin for siblings" else n)
        if coin * q[x] < p[x]:
            return n, p
        left = less(p, q)
        if sum(left) > 0 and wrong != "P itself goes on":
            p = left if wrong == "P not renormalised" else normalised(left)
        if without_replacement:
            keep = wrong == "Q keeps what was tried"
            rest = [0.0 if v == x and not keep else w for v, w in enumerate(q)]
            changed[group] = rest if wrong == "Q not renormalised" else normalised(rest)
    return None, p


def multi_draft(point, wrong):
    return *one_by_one(point, wrong, False), {}


def multi_draft_wor(point, wrong):
    return *one_by_one(point, wrong, True), {}


def target_only(point, wrong):
    """A coin against the running sum of P over the children, as a kernel of SGLang has it."""
    rest, left, seen = 1.0, list(point.p), set()
    for n, x, *_ in point.children:
        if x in seen and wrong != "duplicates counted twice":
            continue
        seen.add(x)
        if point.coin(n) * rest < point.p[x]:
            return n, left, {}
        rest -= point.p[x]
        left[x] = 0.0
    return None, left if sum(left) > 0 else point.p, {}


def top_k_plus_one(point, wrong):
    if not point.children:
        return None, point.p, {}
    *top, (n, x, _, q) = point.children
    ids = {t: m for m, t, *_ in top}
    off = [0.0 if v in ids else w for v, w in enumerate(q)]
    q = q if wrong == "Q instead of q'" else normalised(off)
    if x not in ids and point.coin(n) * q[x] < point.p[x]:
        return n, point.p, {}
    weights = [w if v in ids else max(w - q[v], 0.0) for v, w in enumerate(point.p)]
    return None, weights if sum(weights) > 0 else point.p, ids


@functools.cache
def factor(p, q, k):
    return float(analysis.k_seq_factor(torch.tensor(p), torch.tensor(q), k)[0])


def k_seq(point, wrong):
    if not point.children:
        return None, point.p, {}
    p, q, k = point.p, point.children[0][3], len(point.children)
    rho = factor(tuple(p), tuple(q), k) * (0.9 if wrong == "rho below the root" else 1.0)
    for n, x, *_ in point.children:
        if point.coin(n) * rho * q[x] < p[x]:
            return n, p, {}
    accepted = [min(b, a / rho) for a, b in zip(p, q, strict=True)]
    beta = sum(accepted)
    scale = (1 - (1 - beta) ** k) / beta if beta > 0 else 0.0
    left = less(p, [scale * w for w in accepted])
    return None, left if sum(left) > 0 else p, {}


def walk(judge, wrong=None):
    def verify(tree):
        path, tokens, members = [], [], {-1}
        while True:
            children = [n for n in tree.nodes if tree.parents[n] in members]
            given = [(n, tree.tokens[n], tree.group[n], tree.law(n)) for n in children]
            p = tree.p[(path[-1] if path else -1) + 1]
            node, weights, ids = judge(Point(p, given, tree.uniforms), wrong)
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
                q, x = tree.law(n), tree.tokens[n]
                ratio = a * p[x] / q[x] if q[x] > 0 else float(p[x] > 0)
                found = visit([*path, n], ratio if wrong == "uncapped ratio" else min(1.0, ratio))
                if found:
                    return found
                left = less([w if wrong == "residual without a" else a * w for w in p], q)
                if sum(left) > 0:
                    p = normalised(left)
                a = sum(left) / (sum(left) + 1 - a) if sum(left) > 0 else 1.0 - (a < 1)
            if path and tree.uniforms[node] >= a:
                return None
            y = pick(p, tree.uniforms[tree.count + len(path)])
            return path, [tree.tokens[n] for n in path] + [y]

        return visit([], 1.0)

    return verify


class DraftedTree:
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

    def law(self, node):
        return self.q[self.rows[node]]


def toy(verify):
    """An implementation of the op."""

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


def toy_law(rule, verify, **options):
    setting = ToyTree(rule, **{"tree": "21", "kind": "probs", "seed": 2, **options})
    run = setting.verifier(toy(verify))
    law = analysis.enumerate_tree_distribution(
        run, setting.parents, setting.drafts, setting.weights, setting.target_probs,
        upward=rule == "traversal", steps=26,
    )  # fmt: skip
    return law, setting


WALKS = {
    "multi_draft": multi_draft,
    "multi_draft_wor": multi_draft_wor,
    "target_only": target_only,
    "top_k_plus_one": top_k_plus_one,
    "k_seq": k_seq,
}


def made(rule, wrong=None):
    return traversal(wrong) if rule == "traversal" else walk(WALKS[rule], wrong)


@pytest.mark.parametrize("rule", [*WALKS, "traversal"])
@pytest.mark.parametrize("tree", ["21", "3"])
def test_the_machinery_passes_a_correct(rule, tree):
    assert_target_distribution(*toy_law(rule, made(rule), tree=tree))


def test_the_machinery_passes_a_correct_rule_for_two_drafters():
    assert_target_distribution(
        *toy_law("multi_draft_wor", made("multi_draft_wor"), tree="3", drafters=2)
    )


WRONG = [
    ("multi_draft", "P itself goes on", {}),
    ("multi_draft", "P not renormalised", {}),
    ("multi_draft", "duplicates dropped", {}),
    ("multi_draft_wor", "P itself goes on", {}),
    ("multi_draft_wor", "P not renormalised", {}),
    ("multi_draft_wor", "Q keeps what was tried", dict(tree="3")),
    ("multi_draft_wor", "Q not renormalised", dict(tree="3")),
    ("multi_draft_wor", "duplicates dropped", dict(drafters=2)),
    ("target_only", "duplicates counted twice", dict(how="independent")),
    ("top_k_plus_one", "Q instead of q'", {}),
    ("k_seq", "rho below the root", {}),
    ("traversal", "residual without a", {}),
    ("traversal", "uncapped ratio", {}),
]


@pytest.mark.parametrize(("rule", "wrong", "options"), WRONG,
                         ids=[f"{r}-{w}" for r, w, _ in WRONG])  # fmt: skip
def test_the_machinery_rejects(rule, wrong, options):
    assert_wrong_distribution(*toy_law(rule, made(rule, wrong), v=4, **options))


@pytest.mark.parametrize("rule", ["multi_draft", "multi_draft_wor"])
def test_the_machinery_rejects_a_coin_that_siblings_share(rule):
    with pytest.raises(ValueError, match="not constant in a cell"):
        toy_law(rule, made(rule, "one coin for siblings"), tree="3", v=4)


# Drawn in other ways than the rule is for, and lossless all the same: a repeated draft is none,
# and any tokens will do for the top.
LOSSLESS = [("multi_draft_wor", "independent"), ("top_k_plus_one", "without_replacement"),
            ("target_only", "independent")]  # fmt: skip


@pytest.mark.parametrize(("rule", "how"), LOSSLESS)
def test_passes_other_drafts_that_a_rule_is_lossless_for(rule, how):
    setting = ToyTree(rule, tree="3", v=4, how=how, seed=2)
    assert_target_distribution(setting.realized("cpp"), setting)


# Wrong calls of right kernels: drafts that were drawn in another way, laws that are not theirs.

CALLS = {
    "multi_draft of drafts without replacement": (
        "multi_draft", dict(how="without_replacement")),
    "multi_draft of the likeliest": ("multi_draft", dict(how="top")),
    "k_seq of drafts without replacement": ("k_seq", dict(how="without_replacement")),
    "k_seq of two laws": ("k_seq", dict(drafters=2)),
    "top_k_plus_one of the likeliest": ("top_k_plus_one", dict(how="top")),
    "traversal of drafts without replacement": ("traversal", dict(how="without_replacement")),
    "greedy where tokens are sampled": ("greedy", {}),
    "typical": ("typical", dict(how="top")),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_rejects(name, call):
    rule, options = CALLS[call]
    setting = ToyTree(rule, **{"tree": "21", "seed": 2, **options})
    assert_wrong_distribution(setting.realized(name, steps=26), setting)


@pytest.mark.parametrize("rule", ["multi_draft", "multi_draft_wor", "traversal"])
@pytest.mark.parametrize("name", FAST_PROVIDERS)
def test_rejects_one_law_for_the_drafts_of_two_models(name, rule):
    setting = ToyTree(rule, tree=[-1, -1], v=4, drafters=2, seed=2)

    def change(arguments):
        rows = arguments["draft_rows"]
        return {**arguments, "draft_rows": rows - rows % 2}

    assert_wrong_distribution(setting.realized(name, steps=26, change=change), setting)
