"""Toy trees: small enough to enumerate everything that a verifier can emit.

A toy model is a table of distributions, one for each sequence of tokens before. The enumeration
runs a verifier on every tree that can be drafted and every cell of its uniforms: within a cell,
the verifier emits the same tokens.
"""

import itertools

import torch
from support.providers import verify_tree

import proofs
from proofs import lineage
from proofs.toy_chain import Toy, distributions, logit_tables

# How the children of a node are drawn, for each lossless rule that reads uniforms.
DRAWN = {
    "greedy": "top", "target_only": "top", "multi_draft": "independent",
    "multi_draft_wor": "without_replacement", "top_k_plus_one": "top_k_plus_one",
    "k_seq": "independent", "traversal": "independent",
}  # fmt: skip
TREES = {
    "21": [-1, -1, 0],
    "22": [-1, -1, 0, 0],
    "221": [-1, -1, 0, 0, 1],
    "mixed": [-1, 0, -1, 0, 2],  # not in the order of levels
    "3": [-1, -1, -1],
}


def sibling_distribution(probs, how):
    """(tokens [n, K], probabilities [n]) of K siblings whose distributions are probs [K, V]."""
    if how == "independent":
        v = probs.shape[-1]
        tokens = torch.cartesian_prod(*[torch.arange(v)] * len(probs)).reshape(-1, len(probs))
        return tokens, probs.gather(1, tokens.T).prod(0)
    q, k = probs[0], len(probs)
    order = q.argsort(descending=True, stable=True).tolist()
    order = [x for x in order if float(q[x]) > 0]
    if how == "without_replacement":
        return drawn_without_replacement(q, k)
    if how == "top":
        return torch.tensor([(order + [-1] * k)[:k]]), torch.ones(1, dtype=torch.float64)
    top = (order + [-1] * k)[: k - 1]
    others = q.clone()
    others[[x for x in top if x >= 0]] = 0
    if not float(others.sum()) > 0:
        return torch.tensor([[*top, -1]]), torch.ones(1, dtype=torch.float64)
    return torch.tensor([[*top, x] for x in range(len(q))]), others / others.sum()


def drawn_without_replacement(q, k):
    """(tokens [n, k], probabilities [n]); -1 once no token with a probability remains."""
    rows, weights = [], []
    for tokens in itertools.permutations(range(len(q)), min(k, int((q > 0).sum()))):
        weight, mass = 1.0, float(q.sum())
        for x in tokens:
            weight *= float(q[x]) / mass if q[x] > 0 else 0.0
            mass -= float(q[x])
        if weight > 0:
            rows.append([*tokens, *[-1] * (k - len(tokens))])
            weights.append(weight)
    return torch.tensor(rows), torch.tensor(weights, dtype=torch.float64)


class ToyTree(Toy):
    """Toy models of a target and its drafters, a tree, and arguments of `verify_tree` for drafts.

    tree: a name in TREES, or parents.
    draft: "full"; "sampled", with the statistics that `sample` returns; or "none", where drafts are
        the argmax of a drafter.
    how: how siblings of one drafter are drawn, as in DRAWN.
    holes: whether some tokens have probability 0. same: whether the drafter is the target.
    drafters: the number of draft models; sibling j is drawn from model j % drafters.
    missing: nodes that are absent. ragged: whether the last node has no target row.
    options: more keyword arguments of `verify_tree`.
    """

    op, call = "verify_tree", staticmethod(verify_tree)

    def __init__(self, rule, tree="221", v=3, *, seed=0, draft="full", kind="logits", how=None,
                 dtype=torch.float32, holes=False, same=False, drafters=1, target_filters=None,
                 draft_filters=None, missing=(), ragged=False,
                 **options):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.rule, self.v, self.kind, self.options = rule, v, kind, options
        self.parents = TREES[tree] if isinstance(tree, str) else tree
        self.how = how or DRAWN[rule]
        self.form, self.missing, self.ragged = draft, missing, ragged
        self.target_filters, self.draft_filters = target_filters or {}, draft_filters or {}
        # By node; the last is that of -1.
        self.paths = [lineage(self.parents, n) for n in (*range(len(self.parents)), -1)]
        self.depth = max(map(len, self.paths))
        siblings = [self.parents[:n].count(p) for n, p in enumerate(self.parents)]
        self.drafter = [j % drafters for j in siblings]
        p = [t.to(dtype) for t in logit_tables(generator, v, self.depth + 1, holes=holes)]
        q = [p[:-1] if same else [t.to(dtype) for t in logit_tables(generator, v, self.depth,
             holes=holes)] for _ in range(drafters)]  # fmt: skip
        self.target_probs = distributions(p, **self.target_filters)
        temperature = {k: x for k, x in self.target_filters.items() if k == "temperature"}
        self.draft_probs = [distributions(t, **(self.draft_filters or temperature)) for t in q]
        if kind == "probs":
            p, *q = ([t.float().softmax(-1) for t in x] for x in (p, *q))
            self.target_probs = distributions([t.double().log() for t in p], **self.target_filters)
            self.draft_probs = [[t.double() for t in x] for x in q]
        if draft == "none":
            self.draft_probs = [[torch.nn.functional.one_hot(t.argmax(-1), v).double() for t in x]
                          for x in self.draft_probs]  # fmt: skip
        self.p, self.q = p, q
        self.drafts, weights = proofs.drawn_trees(self.parents, self.draw)
        self.weights = weights / weights.sum()  # float32 probabilities do not add up to 1

    def draw(self, path, nodes):
        """(tokens, probabilities) of the children of a node; drafters are independent."""
        groups = [[n for n in nodes if self.drafter[n] == k] for k in range(len(self.q))]
        parts = []
        for k, group in enumerate(groups):
            if group:
                probs = self.draft_probs[k][len(path)][path].expand(len(group), -1)
                tokens, probabilities = sibling_distribution(probs, self.how)
                parts.append((group, list(zip(tokens.tolist(), probabilities, strict=True))))
        rows, weights = [], []
        for choice in itertools.product(*(part for _, part in parts)):
            given, weight = {}, 1.0
            for (group, _), (tokens, probability) in zip(parts, choice, strict=True):
                given.update(zip(group, tokens, strict=True))
                weight *= float(probability)
            rows.append([-1 if n in self.missing else given[n] for n in nodes])
            weights.append(weight)
        return torch.tensor(rows), torch.tensor(weights, dtype=torch.float64)

    def row(self, table, drafts, node):
        """Rows [C, V] of a table that follow the tokens on the path to a node."""
        path = self.paths[node]
        if not path:
            return table.expand(len(drafts), -1)
        return table[tuple(drafts[:, m] for m in path)]

    def arguments(self, drafts, provider_name):
        """Keyword arguments of `providers.verify_tree` for these tuples."""
        c, n = drafts.shape
        drafts = drafts.clamp(min=0)  # for rows that follow an absent node
        depth = [len(self.paths[node]) for node in range(-1, n)]
        target = torch.stack([self.row(self.p[d], drafts, m - 1) for m, d in enumerate(depth)], 1)
        out = dict(parents=torch.tensor(self.parents).expand(c, n), kind=self.kind, rule=self.rule,
                   **self.target_filters, **self.options)  # fmt: skip
        if self.ragged:
            target = target[:, :n].flatten(0, 1)
            out["target_indptr"] = torch.arange(c + 1, dtype=torch.int32) * n
        return {**out, "target": target, **self._draft(drafts, depth, provider_name)}

    def _draft(self, drafts, depth, provider_name):
        """Draft arguments with a row for each node and model; rows that are not read are NaN."""
        (c, n), models = drafts.shape, len(self.q)
        if self.form == "none":
            return {}
        rows = torch.full((c, n + 1, models, self.v), torch.nan, dtype=self.q[0][0].dtype)
        for node in {*self.parents}:
            for k in range(models):
                rows[:, node + 1, k] = self.row(self.q[k][depth[node + 1]], drafts, node)
        rows = rows.flatten(1, 2)
        which = [(p + 1) * models + k for p, k in zip(self.parents, self.drafter, strict=True)]
        out = dict(draft=rows, draft_rows=torch.tensor(which, dtype=torch.int32).expand(
            c, n).contiguous())  # fmt: skip
        if self.form == "sampled":
            out["sampled"] = self.statistics(rows, provider_name)
        return out

    @staticmethod
    def check(out):
        # A uniform of almost 1 may reject although the residual is empty, which sets bit 2.
        assert not (out[3] & ~4).any()

    def realized(self, name, steps=28, change=lambda arguments: arguments):
        return proofs.enumerate_tree_distribution(
            self.verifier(name, change), self.parents, self.drafts, self.weights, self.target_probs,
            upward=self.rule == "traversal", steps=steps, like=self.boundaries(name, change),
        )  # fmt: skip
