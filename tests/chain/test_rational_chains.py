"""Random calls of `verify_chain` decide as its rules do in rational arithmetic."""

import numpy as np
import pytest
import torch
from proofs import rational

from specdec_kernels import LOSSLESS_RULES, reference, verify_chain
from specdec_kernels.reference.row.noise import SHARED

V = 4
# What floats may decide otherwise: they round the rows, and the sums of them.
NEAR = 1e-5
CALLS = pytest.mark.parametrize("size", [40, pytest.param(2000, marks=pytest.mark.full)])


def expected(rule, batch, b, drafts, uniforms, seed, position, *, plain=False):
    """The tokens that a rule emits, and how near its comparisons were."""
    exact, (p, q) = rational.Exact(plain=plain), batch.rational(b)
    drafts, u = drafts.tolist(), rational.fractions(uniforms)
    if rule in ("token", "block"):
        decide = rational.token if rule == "token" else rational.block
        return decide(exact, p, q, drafts, u, u[-1]), exact.margin
    if rule == "greedy":
        rows = [rational.fractions(-row if plain else row) for row in batch.p[b]]
        wanted = [exact.largest(row) for row in rows]
    else:
        at = range(position + plain, position + plain + len(p))
        noise = [reference.exponentials(seed, i, SHARED, V) for i in at]
        wanted = [rational.shared_choice(exact, *both) for both in zip(p, noise, strict=True)]
    return rational.until_unlike(wanted, drafts), exact.margin


def disagreements(rule, kind, filtered, size, **control):
    """The sequences for which a verifier and a rule emit other tokens, and those that are near."""
    rng, gamma = np.random.default_rng([size, filtered, kind == "probs"]), 3
    batch = rational.Batch.draw(rng, size, gamma + 1, gamma, V, kind, filtered)
    drafts = np.array([[rng.choice(V, p=row) for row in rows] for rows in batch.q])
    uniforms = rng.integers(0, 2**20, (size, gamma + 1)) / 2**20
    seeds, positions = rng.integers(0, 2**40, (2, size))
    given = [torch.from_numpy(x) for x in (drafts, uniforms, seeds, positions)]
    verdict = verify_chain(
        batch.given(batch.p), given[0], batch.given(batch.q), rule=rule,
        uniforms=None if rule == "match" else given[1], seeds=given[2],
        positions=given[3], **batch.arguments(),
    )  # fmt: skip
    given = zip(drafts, uniforms, seeds.tolist(), positions.tolist(), strict=True)
    wanted = [expected(rule, batch, b, *one, **control) for b, one in enumerate(given)]
    return rational.compare(verdict, wanted, NEAR)


@CALLS
@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "filtered"])
@pytest.mark.parametrize("kind", ["probs", "logits"])
@pytest.mark.parametrize("rule", LOSSLESS_RULES)
def test_random_chains_are_decided_as_in_rationals(rule, kind, filtered, size):
    unlike, near = disagreements(rule, kind, filtered, size)
    assert unlike == []
    assert len(near) <= size // 20


@pytest.mark.parametrize("rule", LOSSLESS_RULES)
def test_a_rule_of_chains_with_one_wrong_step_is_rejected(rule):
    """Negative control: it draws from P after a rejection, takes the smallest P, or other noise."""
    assert len(disagreements(rule, "probs", False, 40, plain=True)[0]) > 2
