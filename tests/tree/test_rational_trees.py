"""Random calls of `verify_tree` decide as its rules do in rational arithmetic."""

import functools

import numpy as np
import pytest
import torch
from proofs import rational
from proofs.toy_tree import DRAWN

from specdec_kernels import LOSSLESS_TREE_RULES, Tree, reference, verify_tree
from specdec_kernels.reference.row.noise import SHARED

V, NODES = 4, 6
# What floats may decide otherwise: they round the rows, and the sums of them. They find rho of
# rule k_seq to 1e-6, and divide by its beta.
NEAR = {"k_seq": 1e-4}
DECIDE = {
    "target_only": rational.target_only,
    "multi_draft": functools.partial(rational.one_by_one, wor=False),
    "multi_draft_wor": functools.partial(rational.one_by_one, wor=True),
    "top_k_plus_one": rational.top_k_plus_one,
    "k_seq": rational.k_seq,
}
CALLS = pytest.mark.parametrize("size", [40, pytest.param(1000, marks=pytest.mark.full)])


def drafted(rng, rule, batch, b):
    """Tokens and parents of a random tree, whose siblings are drawn as the rule demands.

    Nodes of one text get the same rows: those of the first of them.
    """
    parents = [int(rng.integers(-1, n)) for n in range(NODES)]
    tokens, paths = [-1] * NODES, {-1: ()}
    for above in range(-1, NODES):
        siblings = [n for n in range(NODES) if parents[n] == above]
        if above not in paths:
            continue  # below an absent node
        q = batch.q[b, above + 1]
        drawn = draw(rng, DRAWN.get(rule, "top"), q, len(siblings))
        for n, x in zip(siblings, drawn, strict=False):
            if rng.random() < 0.95:
                tokens[n] = int(x)
                paths[n] = (*paths[above], tokens[n])
        for n in siblings:
            first = next((m for m in paths if paths[m] == paths.get(n)), n)
            for rows in (batch.p, batch.q):
                rows[b, n + 1] = rows[b, first + 1]
    return tokens, parents


def draw(rng, how, q, count):
    """Up to ``count`` tokens of Q [V]; see `proofs.toy_tree.DRAWN`."""
    if how == "independent":
        return rng.choice(V, count, p=q)
    sure = {"top": count, "top_k_plus_one": count - 1}.get(how, 0)
    found = [x for x in np.argsort(-q, kind="stable")[: max(sure, 0)] if q[x] > 0]
    while len(found) < count and (rest := np.where(np.isin(range(V), found), 0, q)).sum() > 0:
        found.append(rng.choice(V, p=rest / rest.sum()))
    return found


def expected(rule, batch, b, tokens, parents, uniforms, seed, position, *, plain=False):
    """The tokens that a rule emits, and how near its comparisons were."""
    exact, (p, q) = rational.Exact(plain=plain), batch.rational(b)
    u = rational.fractions(uniforms)
    if rule == "greedy":
        p = [rational.fractions(-row if plain else row) for row in batch.p[b]]
    if rule == "target_only" and plain:
        p = [rational.fractions(row) for row in batch.p[b]]
    tree = rational.Tree(tokens, parents, p, q, u[:NODES], u[NODES:])
    if rule == "traversal":
        return rational.traversal(exact, tree), exact.margin
    if rule in DECIDE:
        return rational.descend(exact, tree, DECIDE[rule]), exact.margin

    def choose(exact, tree, node, children, depth):
        row = tree.p[node + 1]
        wanted = exact.largest(row)
        if rule == "match":
            noise = reference.exponentials(seed, position + depth + plain, SHARED, V)
            wanted = rational.shared_choice(exact, row, noise)
        return next((n for n in children if tokens[n] == wanted), None), wanted

    tree.draws = list(range(NODES + 1))
    return rational.descend(exact, tree, choose), exact.margin


def disagreements(rule, kind, filtered, size, **control):
    """The sequences for which a verifier and a rule emit other tokens, and those that are near."""
    rng = np.random.default_rng([size, filtered, kind == "probs"])
    batch = rational.Batch.draw(rng, size, NODES + 1, NODES + 1, V, kind, filtered)
    trees = [drafted(rng, rule, batch, b) for b in range(size)]
    uniforms = rng.integers(0, 2**20, (size, 2 * NODES + 1)) / 2**20
    seeds, positions = rng.integers(0, 2**40, (2, size))
    tokens, parents = (torch.tensor(x) for x in zip(*trees, strict=True))
    given = [torch.from_numpy(x) for x in (uniforms, seeds, positions)]
    verdict = verify_tree(
        batch.given(batch.p), Tree(tokens, parents), batch.given(batch.q), rule=rule,
        draft_rows=(parents + 1).int(), uniforms=None if rule == "match" else given[0],
        seeds=given[1], positions=given[2], **batch.arguments(),
    )  # fmt: skip
    given = zip(trees, uniforms, seeds.tolist(), positions.tolist(), strict=True)
    wanted = [
        expected(rule, batch, b, *tree, *one, **control) for b, (tree, *one) in enumerate(given)
    ]
    return rational.compare(verdict, wanted, NEAR.get(rule, 1e-5))


@CALLS
@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "filtered"])
@pytest.mark.parametrize("kind", ["probs", "logits"])
@pytest.mark.parametrize("rule", LOSSLESS_TREE_RULES)
def test_random_trees_are_decided_as_in_rationals(rule, kind, filtered, size):
    unlike, near = disagreements(rule, kind, filtered, size)
    assert unlike == []
    assert len(near) <= size // 20


@pytest.mark.parametrize("rule", LOSSLESS_TREE_RULES)
def test_a_rule_with_one_wrong_step_is_rejected(rule):
    """Negative control: it draws from P after a rejection, takes the smallest P, or other noise.

    Rule target_only draws as if P were not filtered.
    """
    assert len(disagreements(rule, "probs", rule == "target_only", 40, plain=True)[0]) > 2
